"""`pdserve bench peers` with engines of a few lines in place of the real ones, and the commands of the real ones."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from pathlib import Path

import pytest

from bench import peers_command
from bench.peer_engines import ENGINES, OURS, Engine, Layout, Setting
from bench.peer_table import Seat, Spread
from bench.peers_options import PeersSettings
from engine.errors import ConfigError
from pdserve import cli
from tests.tiny_model import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def make_setting(folder: Path, said: list[str] | None = None) -> Setting:
    said = [] if said is None else said
    return Setting(folder, "bfloat16", folder / "work", {"vllm": folder / "venv"}, said.append, folder / "m.gguf")


def fake_engine(layouts: frozenset[Layout], *, fails: bool = False) -> Engine:
    code = (
        "raise SystemExit(3)"
        if fails
        else f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.bench.fake_process"
    )
    command = shlex.join([sys.executable, "-c", code, "{port}"])
    return Engine(layouts, lambda setting: None, lambda setting, layout: command)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "peers", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize("together", [False, True])
def test_engines_take_turns_and_one_that_fails_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, together: bool
) -> None:
    both = frozenset({Layout.ONE, Layout.TWO})
    monkeypatch.setitem(ENGINES, OURS, fake_engine(both))
    monkeypatch.setitem(ENGINES, "vllm", fake_engine(both))
    monkeypatch.setitem(ENGINES, "llama.cpp", fake_engine(frozenset({Layout.TWO}), fails=True))
    write_tokenizer(tmp_path, 320)
    monkeypatch.setattr(peers_command, "make_setting", lambda settings: make_setting(tmp_path / "tokenizer.json"))
    file = tmp_path / "r.json"
    code, out, err = run(
        capsys,
        *("--peers", "vllm,llama.cpp", "--rows", "single,prefix", "--threads", "2", "--repeats", 2),
        *("--result-filename", file),
        *(["--together"] if together else []),
    )
    assert code == 1, err  # llama.cpp measured nothing
    order = [line.split(":")[0] for line in err.splitlines() if line.startswith("round")]
    turns = [OURS, "vllm", OURS, "vllm"] if together else [OURS, "vllm", "llama.cpp"]
    assert order == [f"round {number}, {name} 2" for number in (1, 2) for name in turns]
    assert len([line for line in err.splitlines() if "ready after" in line]) == (2 if together else 4)
    assert "2 rounds of 3 servers, about" in err
    result = json.loads(file.read_text())
    rounds = result["measured"]["vllm 2"]["single"]
    assert len(rounds) == 2
    assert all(one["decode_tok_s"] > 0 and one["ttft_ms"] > 0 for one in rounds)
    assert result["measured"]["llama.cpp 2"]["prefix"] == [None, None]
    ratios = [one["ratio"] for one in result["comparisons"] if one["their_engine"] == "vllm"]
    assert len(ratios) == 4
    assert all(ratio["low"] <= ratio["middle"] <= ratio["high"] for ratio in ratios)
    assert "shared prefix of 1500" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--peers", "sglang"), "--peers knows vllm, vllm-tuned, llama.cpp, not sglang"),
        (("--rows", "single,all"), "--rows knows single, prefill, concurrent, prefix, interference, not all"),
        (("--rows", ""), "--threads and --rows must not be empty"),
        (("--threads", "3"), "--threads knows 1, 2, pd, not 3"),
        (("--repeats", "0"), "--repeats must be at least 1"),
    ],
)
def test_unknown_choices_are_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith(f"pdserve: {sentence}")


def test_ours_is_colocated_without_a_prefill_node_and_shares_threads_with_one(tmp_path: Path) -> None:
    def flags(layout: Layout) -> tuple[str, ...]:
        words = shlex.split(ENGINES[OURS].command(make_setting(tmp_path), layout))
        return tuple(words[words.index(name) + 1] for name in ("--prefill-nodes", "--threads-per-node", "--dtype"))

    assert flags(Layout.ONE) == ("0", "1", "bfloat16")
    assert flags(Layout.TWO) == ("0", "2", "bfloat16")
    assert flags(Layout.PD) == ("1", "1", "bfloat16")


def test_vllm_gets_as_many_cores_as_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 2, 7})
    one, two = (ENGINES["vllm"].command(make_setting(tmp_path), layout) for layout in (Layout.ONE, Layout.TWO))
    assert "VLLM_CPU_OMP_THREADS_BIND=2 " in one
    assert "VLLM_CPU_OMP_THREADS_BIND=2,4 " in two
    assert "LD_PRELOAD" not in two
    assert f"LD_PRELOAD={tmp_path}/venv/lib/libiomp5.so" in ENGINES["vllm-tuned"].command(
        make_setting(tmp_path), Layout.TWO
    )
    assert "bench.vllm_pd" in ENGINES["vllm"].command(make_setting(tmp_path), Layout.PD)


def test_a_given_environment_is_never_changed(tmp_path: Path) -> None:
    said: list[str] = []
    ENGINES["vllm"].install(make_setting(tmp_path, said))
    assert said == []
    assert not (tmp_path / "venv").exists()


def test_llama_cpp_needs_a_gguf_file_and_is_kept_from_ending(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 320)  # with three special tokens, each of which would end an answer
    setting = make_setting(tmp_path)
    assert ENGINES["llama.cpp"].body(setting) == {"logit_bias": {"0": -100, "1": -100, "2": -100}}
    command = ENGINES["llama.cpp"].command(setting, Layout.TWO)
    assert f"{tmp_path}/work/m-bfloat16.gguf --n_ctx" in command
    assert "--interrupt_requests false" in command  # else the next request ends the one before
    without = Setting(tmp_path, "bfloat16", tmp_path, {}, print)
    with pytest.raises(ConfigError, match="--gguf"):
        ENGINES["llama.cpp"].install(without)


def test_what_was_measured_before_an_interruption_is_printed_and_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"

    def measure(whole: peers_command.Run, seat: Seat, number: int) -> None:
        if seat[0] != OURS:
            # What is there now would be there after a kill, too.
            assert json.loads(file.read_text())["measured"][f"{OURS} 1"]["single"][0]["ttft_ms"] == 7.0
            raise KeyboardInterrupt
        whole.measured[seat]["single"] = [{"decode_tok_s": 123.0, "ttft_ms": 7.0}]
        whole.guessed_done_s += 10.0
        assert whole.left_s() > 0
        whole.save()

    monkeypatch.setattr(peers_command, "measure_seat", measure)
    monkeypatch.setattr(peers_command, "make_setting", lambda settings: make_setting(tmp_path))
    arguments = ("--peers", "vllm", "--rows", "single", "--threads", "1", "--result-filename", file)
    code, out, _ = run(capsys, *arguments)
    assert code != 0
    assert "123" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"]


@pytest.mark.parametrize(
    ("arguments", "rounds", "is_quick"),
    [((), 3, False), (("--quick",), 1, True), (("--quick", "--repeats", 2), 2, True), (("--repeats", 1), 1, False)],
)
def test_how_many_rounds_and_how_much_work_are_two_things(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[object, ...],
    rounds: int,
    is_quick: bool,
) -> None:
    asked: list[tuple[Seat, int, bool]] = []

    def measure(whole: peers_command.Run, seat: Seat, number: int) -> None:
        asked.append((seat, number, whole.settings.quick))
        whole.measured[seat].setdefault("prefill", []).append({"ttft_ms": 100.0 + number})

    monkeypatch.setattr(peers_command, "measure_seat", measure)
    monkeypatch.setattr(peers_command, "make_setting", lambda settings: make_setting(tmp_path))
    layouts = (Layout.TWO, Layout.ONE)  # as they were asked for, each once
    code, out, _ = run(capsys, "--threads", "2,1,2", "--peers", "", "--rows", "prefill,single,prefill", *arguments)
    assert code == 0
    assert asked == [((OURS, layout), number, is_quick) for number in range(rounds) for layout in layouts]
    assert f"Medians of {rounds} rounds" in out  # of ours alone
    assert str(Spread.of([100.0 + number for number in range(rounds)])) in out


@pytest.mark.parametrize(("error", "rounds"), [(ConnectionError, [None]), (KeyboardInterrupt, [])])
def test_what_was_not_reached_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException], rounds: list[None]
) -> None:
    def no_server(command: str) -> None:
        raise error

    monkeypatch.setattr(peers_command, "started_server", no_server)
    seat: Seat = ("vllm", Layout.TWO)
    whole = peers_command.Run(PeersSettings(), make_setting(tmp_path), ["single"], 1, {seat: {}})
    with contextlib.suppress(KeyboardInterrupt):
        peers_command.measure_seat(whole, seat, 0)
    assert whole.measured[seat].get("single", []) == rounds


def test_the_estimate_grows_with_the_rows() -> None:
    engine = ENGINES["vllm"]
    one, all_rows = (peers_command.guess_s(engine, rows, False) for rows in (["single"], list(peers_command.ROWS)))
    assert engine.start_s < one < all_rows
    assert peers_command.guess_s(engine, list(peers_command.ROWS), True) < all_rows
