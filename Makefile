# pdserve: `make serve` runs a cluster on this machine, `make test` runs every test. Both set up .venv first.
#
#   make serve MODEL=... PORT=8000 PREFILL_NODES=1 DECODE_NODES=1 REDIS_URL=redis://... ARGS="--api-key ..."

PYTHON ?= python3
TORCH_VERSION := 2.13.0
# pip arguments for torch alone, such as the index of its CPU wheels.
TORCH_PIP_ARGS ?=
ARGS ?=

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PACKAGES := pdserve router prefill_node decode_node kv_transfer engine kernels
PYTEST_ARGS ?=

export MODEL PORT PREFILL_NODES DECODE_NODES REDIS_URL
SERVE_FLAGS = $(if $(MODEL),"$$MODEL") $(if $(PORT),--port "$$PORT") \
	$(if $(PREFILL_NODES),--prefill-nodes "$$PREFILL_NODES") $(if $(DECODE_NODES),--decode-nodes "$$DECODE_NODES")

.PHONY: serve test report check format proto clean install install-test
.DEFAULT_GOAL := serve

# exec: Ctrl-C and SIGTERM then reach pdserve itself, which drains.
serve: $(VENV)/.installed
	@exec $(VENV)/bin/pdserve serve $(SERVE_FLAGS) $(ARGS)

# Tests that start whole clusters need both cores for themselves and come last, one by one: two at a time took as long. A
# node that gets no time for seconds is taken for dead. TESTS=... runs those alone.
CLUSTER_TESTS := tests/api tests/deploy tests/e2e tests/faults tests/pdserve
TESTS ?=
REPORT_TEST := tests/kernels/test_triton_report.py

test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory -j 2 check $(if $(TESTS),,report)
ifeq ($(TESTS),)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) -n 2 --dist loadfile $(CLUSTER_TESTS:%=--ignore=%) --ignore=$(REPORT_TEST)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) $(CLUSTER_TESTS)
else
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) $(TESTS)
endif

# Compiles every GPU kernel in processes of its own; the table of what each takes is shown (-s).
report: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) -s $(REPORT_TEST)

# Style, types, the floors, and that the generated protocol code is what its sources say.
check: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m proto.generate --check

format: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

proto: $(VENV)/.installed-test
	$(VENV)/bin/python -m proto.generate

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/_cpu_*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pdserve needs Python 3.11 or newer, and $(PYTHON) is older; pass PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
		{ echo "$(PYTHON) cannot make virtual environments; install its venv package (python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than what decides the installation when that is installed; pip runs only when it is not. The CPU
# kernels are compiled by it, where a C++ compiler is.
INSTALLED := pyproject.toml setup.py kernels/cpu_variants.py $(wildcard kernels/cpu/*)

# Modules are compiled when they are first imported: all of them are many times what is ever used.
define install
@echo "Installing into $(VENV); this happens once and takes some minutes."
$(PIP) install --no-compile $(TORCH_PIP_ARGS) torch==$(TORCH_VERSION)
$(PIP) install --no-compile --editable '.$(1)'
endef

$(VENV)/.installed: $(INSTALLED) | $(VENV)/bin/python
	$(call install)
	@touch $@

# Includes the above, which would compile the kernels once more.
$(VENV)/.installed-test: $(INSTALLED) | $(VENV)/bin/python
	$(call install,[test])
	@touch $(VENV)/.installed $@
