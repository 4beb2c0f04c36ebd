"""The commands as a user meets them: help, sentences and exit codes."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve import cli

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("serve", "router", "prefill", "decode", "chat", "status", "health")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_flags(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert f"pdserve {command}" in out


def test_serve_has_the_flags_that_it_must_have(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "serve", "--help")
    flags = (
        "--host --port --grpc-port --prefill-nodes --decode-nodes --dtype --max-model-len --block-size --num-blocks "
        "--kv-memory --max-num-batched-tokens --max-num-seqs --threads-per-node --redis-url --served-model-name "
        "--api-key --seed --local-prefill-threshold --max-waiting-requests --drain-timeout --progress-deadline "
        "--log-level --config"
    )
    assert [flag for flag in flags.split() if flag not in out] == []


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pdserve import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'grpc', 'uvicorn', 'redis'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    began = time.process_time(), os.times().children_user
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.times().children_user - began[1] < 2.0  # of the processor, so that a busy machine does not matter


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("serve", "--port", "abc"), "pdserve: --port: "),
        (("serve", "--decode-nodes", "0"), "pdserve: --decode-nodes: "),
        (("prefill", "--kv-memory", "5XB"), "pdserve: --kv-memory: '5XB' is not a size"),
        (("decode", "--block-size", "0"), "pdserve: --block-size must be greater than 0, not 0."),
        (("router", "--log-level", "loud"), "pdserve: --log-level: 'loud' is none of"),
        (("serve", "--prot", "1"), "pdserve: No such option: --prot"),
        (("sevre",), "pdserve: No such command 'sevre'"),
        (("health",), "pdserve: give either --url or --grpc."),
    ],
)
def test_wrong_setting_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith(sentence)
    assert err.count("\n") == 1


def test_port_taken_is_said_before_anything_slow(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "serve", "--port", str(port), "/no/such/model")
    assert (code, out) == (1, "")
    assert err == f"pdserve: Port {port} on 127.0.0.1 is taken by another process; stop it or choose another port.\n"


def test_missing_model_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "model.gguf")
    code, _, err = run(capsys, "serve", missing, "--port", "0", "--grpc-port", "off")
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith("pdserve: ")
    assert "model.gguf" in last


def test_more_memory_than_there_is_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "serve", "--port", "0", "--kv-memory", "100TiB")
    assert code == 2
    assert "pdserve: 2 nodes with --kv-memory" in err


@pytest.mark.parametrize("command", ["serve", "router", "prefill", "decode"])
def test_the_other_package_named_kernels_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    info = tmp_path / "kernels-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    code, _, err = run(capsys, command)
    assert code == 2
    assert err.startswith("pdserve: The package 'kernels' from Hugging Face is installed here and clashes")
    assert err.count("\n") == 1


def test_health_of_nobody_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "health", "--url", "http://127.0.0.1:1", "--timeout", "1")
    assert code == 1
    assert "does not answer" in err
    code, _, err = run(capsys, "health", "--grpc", "127.0.0.1:1", "--timeout", "1")
    assert code == 1
    assert "does not answer" in err
