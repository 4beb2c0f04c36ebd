"""Downloading from a hub: only what is needed, and one sentence when the hub says no. The hub is a small local one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.model_store import resolve_model
from engine.safetensors_file import TensorEntry, write_tensors

COMMIT = "1" * 40
MODEL = "someone/model"


class Hub(ThreadingHTTPServer):
    """Answers as much of the hub's protocol as its client asks for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.refusal: tuple[int, str] | None = None


class _Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.refusal is not None:
            status, code = self.server.refusal
            self._send(b"", status=status, **{"X-Error-Code": code, "X-Error-Message": "no"})
        elif path.startswith(f"/api/models/{MODEL}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.server.files.items()
            ]
            self._send(json.dumps(tree).encode())
        elif path.startswith(f"/api/models/{MODEL}"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.server.files.items()]
            self._send(json.dumps({"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/{MODEL}/resolve/") and (name := path.rsplit("/", 1)[1]) in self.server.files:
            content = self.server.files[name]
            if self.command == "GET":
                self.server.fetched.append(name)
            self._send(content, **{"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(b"", status=404)

    def _send(self, content: bytes, *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not on the tests' output."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    weights = tmp_path / "weights"
    write_tensors(weights, [TensorEntry("a", "F32", (2,))], [bytes(8)])
    server.files = {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"eos_token": null}',
        "model.safetensors": weights.read_bytes(),
        "pytorch_model.bin": b"pickle",
        "modeling_own.py": b"raise SystemExit(9)",
        "README.md": b"long",
    }
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def quiet(_: str) -> None:
    """Progress that no test looks at."""


def test_only_what_is_needed_is_downloaded_and_only_once(hub: Hub) -> None:
    progress: list[str] = []
    text = resolve_model(MODEL, weights=False, report=progress.append)
    assert sorted(hub.fetched) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert any("downloading" in line for line in progress)
    hub.fetched.clear()
    files = resolve_model(MODEL, report=quiet)
    assert hub.fetched == ["model.safetensors"]
    assert (files.model_id, files.folder) == (MODEL, text.folder)
    hub.fetched.clear()
    hub.refusal = (503, "")
    assert resolve_model(MODEL, report=quiet) == files
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        ((404, "RepoNotFound"), "neither a local path nor on the Hugging Face hub"),
        ((403, "GatedRepo"), "gated"),
        ((503, ""), "HTTP 503"),
    ],
)
def test_refusals_are_one_sentence(hub: Hub, refusal: tuple[int, str], sentence: str) -> None:
    hub.refusal = refusal
    with pytest.raises(ConfigError, match=sentence) as caught:
        resolve_model(MODEL, report=quiet)
    assert "\n" not in str(caught.value)


def test_no_room_for_the_download_is_said_before_it_starts(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(ConfigError, match="GB of disk"):
        resolve_model(MODEL, report=quiet)
    assert "model.safetensors" not in hub.fetched


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_repository_without_what_is_needed(hub: Hub, name: str) -> None:
    del hub.files[name]
    with pytest.raises(ConfigError, match=f"no {name}"):
        resolve_model(MODEL, report=quiet)


def test_broken_download_is_named(hub: Hub) -> None:
    whole = hub.files.pop("model.safetensors")
    hub.files["model.safetensors"] = whole[:-2]
    with pytest.raises(ConfigError, match="truncated"):
        resolve_model(MODEL, report=quiet)
