"""Benchmarks against a real cluster: open and closed loop, shared prefixes, chat, and what the router costs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import footprint
from bench.server import RunningServer
from bench.vocabulary import Vocabulary
from pdserve import cli
from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses
from tests.e2e.conftest import ClusterFactory

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(make_cluster: ClusterFactory) -> ClusterProcesses:
    return make_cluster()


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_real_cluster_under_load(cluster: ClusterProcesses, tiny_model: Path, tmp_path: Path) -> None:
    def result_of(seed: int, *arguments: object) -> dict[str, Any]:
        file = tmp_path / "r.json"
        code = run(
            *("--base-url", cluster.url(), "--tokenizer", tiny_model, "--seed", seed, "--return-token-ids"),
            *("--save-result", "--save-detailed", "--result-filename", file, *arguments),
        )
        assert code == 0
        result: dict[str, Any] = json.loads(file.read_text())
        assert (result["failed"], result["short_answers"]) == (0, 0)
        assert result["tokens_counted_by"] == {"usage": result["completed"]}
        return result

    closed = result_of(1, "--num-prompts", 6, "--max-concurrency", 3, "--input-len", 40, "--output-len", 8)
    assert (closed["input_lens"], closed["output_lens"]) == ([40] * 6, [8] * 6)
    assert closed["total_cached_tokens"] == 0
    assert all(0 < ttft <= latency for ttft, latency in zip(closed["ttfts"], closed["latencies"], strict=True))

    prefix = ("--prefix-repetition-prefix-len", 64, "--prefix-repetition-suffix-len", 8)
    shared = result_of(
        *(2, "--dataset-name", "prefix_repetition", *prefix, "--prefix-repetition-num-prefixes", 1),
        *("--num-prompts", 3, "--prefix-repetition-output-len", 4, "--max-concurrency", 1),
    )
    assert shared["total_cached_tokens"] == 2 * 64

    chat = result_of(
        *(3, "--endpoint", "/v1/chat/completions", "--num-prompts", 4, "--request-rate", 20, "--burstiness", "inf"),
        *("--input-len", 20, "--output-len", 5),
    )
    assert chat["backend"] == "openai-chat"
    assert chat["output_lens"] == [5] * 4
    cluster.assert_idle()


def test_what_the_router_costs(cluster: ClusterProcesses, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "IDLE_S", 0.2)
    monkeypatch.setattr(footprint, "REPEATS", 1)
    router = psutil.Process(cluster["router-0"].pid)
    server = RunningServer(f"{cluster.url()}/v1", MODEL_NAME)
    figures = asyncio.run(footprint.measure(server, router, Vocabulary.of_tokenizer(str(tiny_model))))
    assert figures["router_cpu_per_request_ms"][0] > 0
    assert {len(values) for values in figures.values()} == {1}
    memory = footprint.memory_mib(router)
    assert memory["rss_anon"] > 0
    assert memory["pss"] > 0
    assert "router" in footprint.processes_of(router.pid)
    cluster.assert_idle()
