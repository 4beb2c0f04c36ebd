"""What can be said of the deployment files by reading them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

from tests.deploy.compose_file import ROOT, env_example, load, seconds, variables_used

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROLES = ("router", "prefill", "decode")


def test_every_variable_of_compose_is_in_the_example_and_none_is_left_over() -> None:
    assert variables_used() == set(env_example())


def test_compose_refuses_to_start_without_a_redis_password() -> None:
    with pytest.raises(ValueError, match=r"REDIS_PASSWORD: copy \.env\.example to \.env"):
        load({})


def test_services_can_be_scaled_and_restarted() -> None:
    compose = load(env_example())
    services = compose["services"]
    assert set(services) == {"redis", *ROLES}
    for name, service in services.items():
        assert "container_name" not in service
        assert "hostname" not in service
        assert service["networks"] == ["cluster"]
        assert service["restart"] == "unless-stopped"
        assert service["init"] is True
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
        assert ("ports" in service) == (name == "router")
    assert services["prefill"]["deploy"]["replicas"] == 2
    assert services["decode"]["deploy"]["replicas"] == 2
    assert services["decode"]["shm_size"]
    assert set(compose["networks"]) == {"cluster"}


def test_a_stop_waits_longer_than_a_drain() -> None:
    services = load(env_example())["services"]
    for role in ROLES:
        drain_s = float(services[role]["environment"]["PDSERVE_DRAIN_TIMEOUT"])
        assert seconds(services[role]["stop_grace_period"]) > drain_s + 10


def test_only_what_clients_need_is_published_and_only_to_this_host() -> None:
    assert load(env_example())["services"]["router"]["ports"] == ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"]


def test_image_has_every_package_and_installs_dependencies_before_the_code() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert set(PROJECT["tool"]["setuptools"]["packages"]) <= set(sources)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == allowed
    order = [DOCKERFILE.index(step) for step in ("torch==", "-r requirements.txt", "COPY engine", "--no-deps .")]
    assert order == sorted(order)


def test_image_has_both_variants_runs_as_nobody_special_and_stops_by_sigterm() -> None:
    assert "FROM runtime-${VARIANT} AS runtime" in DOCKERFILE
    assert "FROM base AS runtime-cpu" in DOCKERFILE
    assert "FROM base AS runtime-cuda" in DOCKERFILE
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)[-1] == "10001:10001"
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE
    match = re.search(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)
    assert match is not None
    assert json.loads(match[1]) == ["pdserve"]


def test_torch_is_the_same_version_everywhere() -> None:
    pinned = next(one for one in PROJECT["project"]["dependencies"] if one.startswith("torch=="))
    version = pinned.removeprefix("torch==")
    assert f"ARG TORCH_VERSION={version}\n" in DOCKERFILE
    assert f"TORCH_VERSION := {version}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_dependencies_are_listed_for_the_image() -> None:
    script = ROOT / "deploy" / "list_dependencies.py"
    done = subprocess.run([sys.executable, script, ROOT / "pyproject.toml"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == PROJECT["project"]["dependencies"]
