"""Runs `pdserve bench serve`: settings to work and arrivals, load, result, report."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from bench import html_report, report
from bench.arrivals import Arrivals
from bench.datasets import PromptMaker, RandomLengths, file_work, random_work, shared_prefix_work
from bench.load import LoadRun, run_load
from bench.metrics import METRIC_NAMES, SLO_NAMES, Statistics, details, summarise
from bench.progress import showing
from bench.request_record import RequestRecord, Work
from bench.serve_options import DatasetName, ServeSettings
from bench.server import first_model
from bench.stream_client import StreamClient, Target
from bench.traces import MOONCAKE_BLOCK, TraceScale, read_trace, scale_trace, trace_work
from bench.vocabulary import Vocabulary
from engine.errors import ConfigError

DEFAULT_PROMPTS = 100
MOONCAKE_OUTPUT_DIVISOR = 16.0


def run(settings: ServeSettings) -> int:
    """0 when a request succeeded, 1 when all failed."""
    percentiles = _numbers("--metric-percentiles", settings.metric_percentiles)
    metrics = settings.percentile_metrics.split(",")
    if unknown := set(metrics) - METRIC_NAMES.keys():
        raise typer.BadParameter(
            f"--percentile-metrics knows {', '.join(METRIC_NAMES)}, not {', '.join(sorted(unknown))}"
        )
    slos_ms = _slos([*(settings.goodput or ()), *(settings.more_slos or ())])
    metadata = _pairs("--metadata", settings.metadata)
    rng = np.random.default_rng(settings.seed)
    vocabulary = Vocabulary.of_tokenizer(settings.tokenizer) if settings.tokenizer else Vocabulary()
    if any(number is not None and number < 1 for number in (settings.num_prompts, settings.max_concurrency)):
        raise typer.BadParameter("--num-prompts and --max-concurrency must be at least 1")
    work = make_work(settings, vocabulary, rng)
    arrivals_s = make_arrivals(settings, work, rng)
    target = find_target(settings)
    load = asyncio.run(_load(settings, target, vocabulary, work, arrivals_s))
    result = {
        **_configuration(settings, target, len(work), metadata),
        **summarise(
            load.records,
            load.duration_s,
            metrics=metrics,
            percentiles=percentiles,
            slos_ms=slos_ms,
            has_queue=settings.max_concurrency is not None,
        ),
        "client_cpu_percent": 100 * load.client_cpu_s / load.duration_s,
        **Statistics.of(load.loop_lags_s, sorted({*percentiles, 99.0})).entries("client_loop_lag"),
    }
    print(report.text_of(result, percentiles))
    _show_errors(load.records)
    if settings.html is not None:
        html_report.write_page(settings.html, result, load.records, load.started_s, percentiles)
    if settings.save_result or settings.append_result:
        if settings.save_detailed:
            result |= details(load.records, load.started_s)
        name = settings.result_filename or report.default_name(result)
        report.save(result, (settings.result_dir or Path()) / name, append=settings.append_result)
    return 0 if result["completed"] else 1


def make_work(settings: ServeSettings, vocabulary: Vocabulary, rng: np.random.Generator) -> list[Work]:
    """What the dataset holds. Raises ConfigError or BadParameter."""
    as_text = settings.send_text or settings.endpoint.rstrip("/").endswith("chat/completions")
    maker = PromptMaker(vocabulary, rng, as_text=as_text)
    count = DEFAULT_PROMPTS if settings.num_prompts is None else settings.num_prompts
    match settings.dataset_name:
        case DatasetName.RANDOM:
            inputs, outputs = _ratios(settings.random_range_ratio)
            input_len = settings.input_len or settings.random_input_len
            output_len = settings.output_len or settings.random_output_len
            with _naming_flags():
                lengths = RandomLengths(input_len, output_len, inputs, outputs)
            return random_work(maker, count, lengths, settings.random_prefix_len)
        case DatasetName.PREFIX_REPETITION:
            return shared_prefix_work(
                maker,
                count,
                prefixes=settings.prefix_repetition_num_prefixes,
                prefix_len=settings.prefix_repetition_prefix_len,
                suffix_len=settings.prefix_repetition_suffix_len,
                output_len=settings.output_len or settings.prefix_repetition_output_len,
                shuffle=not settings.disable_shuffle,
            )
        case DatasetName.TRACE:
            return _trace(settings, maker)
    shuffler = None if settings.disable_shuffle else rng
    path = _path_of(settings)
    return file_work(path, vocabulary, settings.num_prompts, output_len=settings.output_len, rng=shuffler)


def _trace(settings: ServeSettings, maker: PromptMaker) -> list[Work]:
    rows = read_trace(_path_of(settings))
    is_mooncake = rows[0].hash_ids is not None
    divisor = settings.trace_output_divisor
    with _naming_flags():
        scale = TraceScale(
            block_size=settings.trace_block_size,
            input_divisor=settings.trace_input_divisor,
            output_divisor=divisor if divisor is not None else MOONCAKE_OUTPUT_DIVISOR if is_mooncake else 1.0,
            speed=settings.trace_speed,
            spread_s=settings.trace_spread,
            start_s=settings.trace_start,
            duration_s=settings.trace_duration,
        )
        scaled = scale_trace(rows, scale)[: settings.num_prompts]
    if not scaled:
        raise ConfigError("No request of the trace lies in the chosen part.")
    if is_mooncake:
        divisor_text = f"{MOONCAKE_BLOCK // scale.block_size}, blocks of {scale.block_size} tokens"
        print(f"Trace: prompts / {divisor_text}, answers / {scale.output_divisor:g}.", file=sys.stderr)
    return trace_work(scaled, maker, scale.block_size, settings.seed)


def make_arrivals(settings: ServeSettings, work: Sequence[Work], rng: np.random.Generator) -> list[float]:
    """Times of a trace where the work has them, else of the arrival process."""
    with _naming_flags():
        arrivals = Arrivals(
            settings.request_rate,
            settings.burstiness,
            settings.burst_size,
            settings.ramp_up_strategy,
            settings.ramp_up_start_rps,
            settings.ramp_up_end_rps,
        )
    times_s = [one.at_s for one in work if one.at_s is not None]
    return times_s if len(times_s) == len(work) else arrivals.times(len(work), rng)


async def _load(
    settings: ServeSettings, target: Target, vocabulary: Vocabulary, work: Sequence[Work], arrivals_s: Sequence[float]
) -> LoadRun:
    """Warm the server up, and send everything."""
    if target.is_chat and any(not isinstance(one.prompt, str) for one in work):
        raise ConfigError("Chat endpoints take texts, but a prompt of the file is made of token ids.")
    async with StreamClient(target) as client:
        if settings.ready_check_timeout_sec:
            [first] = warm_up_work(work, 1, vocabulary, settings.seed)
            await _wait_until_ready(client, replace(first, output_tokens=1), settings.ready_check_timeout_sec)
        if settings.num_warmups:
            warm = warm_up_work(work, settings.num_warmups, vocabulary, settings.seed)
            warmed = await run_load(client, warm, [0.0] * len(warm), max_concurrency=settings.max_concurrency)
            _show_errors(warmed.records)
        with showing(len(work), enabled=not settings.disable_tqdm) as on_tick:
            load = await run_load(
                client,
                work,
                arrivals_s,
                max_concurrency=settings.max_concurrency,
                on_tick=on_tick,
                returns_when_cancelled=True,
            )
    return load


async def _wait_until_ready(client: StreamClient, work: Work, timeout_s: float) -> None:
    """Ask until an answer comes whole: an API may answer before its nodes do. Raises ConfigError."""
    deadline_s = client.clock() + timeout_s
    while True:
        record = RequestRecord(0, work.output_tokens)
        await client.send(work, record)
        if record.has_succeeded:
            return
        if client.clock() > deadline_s:
            raise ConfigError(f"The server is not ready within {timeout_s:g} s: {record.error_kind}: {record.error}")
        await asyncio.sleep(0.5)


def find_target(settings: ServeSettings) -> Target:
    """What to ask, once the server answers. Raises ConfigError."""
    base_url, headers = base_url_of(settings), _headers(settings)
    return Target(
        base_url + settings.endpoint,
        settings.model or wait_for_model(base_url, headers, settings.ready_check_timeout_sec),
        headers,
        _body(settings),
        settings.request_timeout,
        keep_text=settings.save_detailed,
    )


def warm_up_work(work: Sequence[Work], count: int, vocabulary: Vocabulary, seed: int) -> list[Work]:
    """As long as the first requests, but of other tokens, so that no prefix of theirs is cached.

    Texts of unknown length are sent as they are.
    """
    maker = PromptMaker(vocabulary, np.random.default_rng([seed, 1]), as_text=isinstance(work[0].prompt, str))
    chosen = [work[index % len(work)] for index in range(count)]
    return [
        maker.work(maker.draw(one.prompt_tokens), one.output_tokens) if one.prompt_tokens else one for one in chosen
    ]


def wait_for_model(base_url: str, headers: Mapping[str, str], timeout_s: float) -> str:
    """The first model that is served, as soon as the server answers. Raises ConfigError."""
    deadline_s = time.monotonic() + timeout_s
    while (model := first_model(f"{base_url}/v1", headers)) is None:
        if time.monotonic() >= deadline_s:
            raise ConfigError(f"GET {base_url}/v1/models names no model. Is the server there? Or give --model.")
        time.sleep(0.5)
    return model


def base_url_of(settings: ServeSettings) -> str:
    """Without a closing /v1, which is part of the endpoint."""
    base_url = settings.base_url or f"http://{settings.host}:{settings.port}"
    return base_url.rstrip("/").removesuffix("/v1")


def _headers(settings: ServeSettings) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    return headers | _pairs("--header", settings.header)


def _body(settings: ServeSettings) -> dict[str, Any]:
    """Fields of every request beyond prompt, length and stream."""
    is_generated = settings.dataset_name not in (DatasetName.SHAREGPT, DatasetName.CUSTOM)
    fields: dict[str, Any] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "ignore_eos": (is_generated if settings.ignore_eos is None else settings.ignore_eos) or None,
        "return_token_ids": settings.return_token_ids or None,
    }
    try:
        extra = json.loads(settings.extra_body or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise typer.BadParameter("--extra-body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None} | extra


def _configuration(settings: ServeSettings, target: Target, count: int, metadata: dict[str, str]) -> dict[str, Any]:
    """What was asked for, under the keys of `vllm bench serve`."""
    backend = "openai-chat" if target.is_chat else "openai"
    configuration: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": settings.label,
        "model_id": target.model,
        "tokenizer_id": settings.tokenizer,
        "num_prompts": count,
        **metadata,
        "request_rate": settings.request_rate if settings.request_rate < float("inf") else "inf",
        "burstiness": settings.burstiness if settings.burstiness < float("inf") else "inf",
        "max_concurrency": settings.max_concurrency,
        "dataset_name": settings.dataset_name.value,
        "seed": settings.seed,
    }
    if settings.ramp_up_strategy is not None:
        configuration["ramp_up_strategy"] = settings.ramp_up_strategy.value
        configuration["ramp_up_start_rps"] = settings.ramp_up_start_rps
        configuration["ramp_up_end_rps"] = settings.ramp_up_end_rps
    return configuration


def _show_errors(records: Sequence[RequestRecord]) -> None:
    """The first of each kind, in full."""
    first = {record.error_kind: record for record in reversed(records) if record.error_kind}
    for kind, record in first.items():
        print(f"First {kind}: request {record.index}: {record.error}", file=sys.stderr)


@contextmanager
def _naming_flags() -> Iterator[None]:
    """Turn the ValueError of a settings class, which names a field first, into one that names the flag."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise typer.BadParameter("--" + name.replace("_", "-") + " " + rest) from error


def _path_of(settings: ServeSettings) -> Path:
    if settings.dataset_path is None:
        raise typer.BadParameter(f"--dataset-path is needed for --dataset-name {settings.dataset_name.value}")
    return settings.dataset_path


def _slos(pairs: Sequence[str]) -> dict[str, float]:
    """Objectives in milliseconds of `ttft:500`."""
    slos_ms: dict[str, float] = {}
    for pair in " ".join(pairs).split():
        name, _, value = pair.partition(":")
        if name not in SLO_NAMES:
            raise typer.BadParameter(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, not {pair!r}")
        [slos_ms[name]] = _numbers("--goodput", value)
    return slos_ms


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{name} takes numbers, not {text!r}") from None


def _ratios(text: str) -> tuple[float, float]:
    """Of prompts and of answers: one number for both, or a JSON object with `input` and `output`."""
    try:
        value = json.loads(text)
        both = {"input": value, "output": value} if isinstance(value, int | float) else value
        return float(both.get("input", 0)), float(both.get("output", 0))
    except (ValueError, TypeError, AttributeError):
        raise typer.BadParameter(f"--random-range-ratio takes a number or JSON, not {text!r}") from None


def _pairs(name: str, texts: Sequence[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{name} takes KEY=VALUE, not {text!r}")
        pairs[key.strip()] = value.strip()
    return pairs
