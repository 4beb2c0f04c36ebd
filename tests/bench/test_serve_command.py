"""`pdserve bench serve` as a user meets it, against a fake server; tests/e2e has a real one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.request_record import Work
from bench.serve_command import warm_up_work
from bench.vocabulary import Vocabulary
from pdserve import cli
from tests.bench.fake_server import FakeServer, serving, whole_answer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def bench_serve(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", "serve", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return bench_serve


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """On a thread of its own, since the command runs its own event loop."""
    started: list[FakeServer] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving(whole_answer) as server:
            started.append(server)
            ready.set()
            while not over.is_set():  # noqa: ASYNC110  (set by another thread)
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield started[0]
    over.set()
    thread.join(60)


def base_of(server: FakeServer) -> str:
    return server.url.removesuffix("/completions")


def test_result_file_and_page(run: Run, fake: FakeServer, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "run.html"
    code, out, _ = run(
        *(
            "--base-url",
            base_of(fake),
            "--model",
            "org/m",
            "--num-prompts",
            5,
            "--max-concurrency",
            2,
            "--num-warmups",
            1,
        ),
        *("--random-input-len", 6, "--random-output-len", 3, "--goodput", "ttft:60000", "e2el:60000"),
        *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "25,99", "--metadata", "machine=here"),
        *("--save-result", "--save-detailed", "--result-dir", tmp_path, "--html", page, "--temperature", 0),
    )
    assert code == 0
    assert "Successful requests:                     5" in out
    assert "Median TTFT (ms):" in out
    assert "TPOT" not in out
    [file] = tmp_path.glob("openai-infqps-concurrency2-m-*.json")
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (5, 0, 15)
    assert (result["machine"], result["request_rate"], result["max_concurrency"]) == ("here", "inf", 2)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert {"p25_ttft_ms", "p99_e2el_ms", "mean_ttft_ms", "std_e2el_ms"} <= result.keys()
    assert result["output_lens"] == [3] * 5
    assert len(result["itls"]) == len(result["generated_texts"]) == 5
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in fake.bodies)
    assert len(fake.bodies) == 6  # with the warm-up
    prompts = [body["prompt"] for body in fake.bodies]
    assert prompts[0] not in prompts[1:]
    text = page.read_text()
    assert "Serving Benchmark Result" in text
    assert "<script src" not in text
    assert "<link" not in text


def test_results_can_be_appended_as_lines(run: Run, fake: FakeServer, tmp_path: Path) -> None:
    arguments = ("--base-url", base_of(fake), "--model", "m", "--num-prompts", 1, "--append-result")
    for _ in range(2):
        code, _, _ = run(*arguments, "--result-filename", tmp_path / "all.jsonl", "--output-len", 2, "--input-len", 4)
        assert code == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [1, 1]


def test_when_all_fail_the_exit_code_is_1_and_the_reason_is_shown(run: Run, fake: FakeServer) -> None:
    code, out, err = run("--base-url", base_of(fake), "--model", "m", "--num-prompts", 3, "--endpoint", "/v1/none")
    assert code == 1
    assert "Failed with http_404:                    3" in out
    assert "First http_404: request 0: 404: Not Found" in err


def test_a_trace_is_replayed_at_its_times(run: Run, fake: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 40, "hash_ids": [7, 8]},
        {"timestamp": 300, "input_length": 600, "output_length": 20, "hash_ids": [7, 9]},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = run(
        *("--base-url", base_of(fake), "--model", "m", "--dataset-name", "trace", "--dataset-path", trace),
        *("--save-result", "--save-detailed", "--result-filename", tmp_path / "r.json", "--trace-speed", 2),
    )
    assert code == 0, err
    first, second = fake.bodies
    assert (len(first["prompt"]), first["max_tokens"]) == (32, 2)
    assert (len(second["prompt"]), second["max_tokens"]) == (19, 1)
    assert first["prompt"][:16] == second["prompt"][:16]
    starts_s = json.loads((tmp_path / "r.json").read_text())["start_times"]
    assert starts_s[1] >= 0.149
    assert "prompts / 32, blocks of 16 tokens, answers / 16" in err
    code, _, err = run(
        *("--base-url", base_of(fake), "--model", "m", "--dataset-name", "trace", "--dataset-path", trace),
        *("--trace-input-divisor", 2),
    )
    assert code == 2
    assert err.startswith("pdserve: --trace-input-divisor is not for Mooncake's traces: ")


def test_a_server_that_is_not_ready_yet_is_waited_for(run: Run, fake: FakeServer) -> None:
    arguments = ("--base-url", base_of(fake), "--model", "m", "--num-prompts", 1, "--input-len", 3, "--output-len", 2)
    fake.refusals = 1
    code, out, _ = run(*arguments)
    assert code == 1
    assert "Failed with http_503:                    1" in out
    fake.refusals = 2
    code, out, _ = run(*arguments, "--ready-check-timeout-sec", 60)
    assert code == 0
    assert "Successful requests:                     1" in out
    assert [body["max_tokens"] for body in fake.bodies] == [1, 2]


def test_a_part_of_a_trace_is_chosen_before_it_is_counted(run: Run, fake: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 1000 * index, "input_length": 10 + index, "output_length": 1} for index in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, _ = run(
        *("--base-url", base_of(fake), "--model", "m", "--dataset-name", "trace", "--dataset-path", trace),
        *("--trace-start", 2, "--num-prompts", 2, "--trace-speed", 100),
    )
    assert code == 0
    assert sorted(len(body["prompt"]) for body in fake.bodies) == [12, 13]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--goodput", "itl:5"), "--goodput takes ttft:MS, tpot:MS and e2el:MS, not 'itl:5'"),
        (("--request-rate", "0"), "--request-rate must be above 0"),
        (("--percentile-metrics", "ttft,speed"), "--percentile-metrics knows ttft, tpot, itl, e2el, not speed"),
        (("--metric-percentiles", "x"), "--metric-percentiles takes numbers, not 'x'"),
        (("--dataset-name", "trace"), "--dataset-path is needed for --dataset-name trace"),
        (("--num-prompts", "0"), "--num-prompts and --max-concurrency must be at least 1"),
        (("--metadata", "x"), "--metadata takes KEY=VALUE, not 'x'"),
        (("--extra-body", "[1]"), "--extra-body must be a JSON object"),
        (("--endpoint", "/v1/chat/completions"), "Texts need --tokenizer, the folder or name of the model"),
        (("--base-url", "http://127.0.0.1:1"), "GET http://127.0.0.1:1/v1/models names no model"),
    ],
)
def test_what_cannot_work_is_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    model = () if "--base-url" in arguments else ("--model", "m")
    code, out, err = run(*model, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"pdserve: {sentence}")


def test_warm_up_is_as_long_as_the_work_and_shares_no_token_sequence() -> None:
    vocabulary = Vocabulary(range(1000, 9000))
    work = [Work(vocabulary.draw(20, np.random.default_rng(0)), 20, 5), Work("unknown", 0, 3)]
    first, second, third = warm_up_work(work, 3, vocabulary, seed=0)
    assert (first.prompt_tokens, first.output_tokens, third.prompt_tokens) == (20, 5, 20)
    assert first.prompt != work[0].prompt
    assert second is work[1]
