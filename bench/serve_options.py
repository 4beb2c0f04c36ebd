"""Every flag of `pdserve bench serve`. Those that `vllm bench serve` has keep its names and meanings."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

SettingsT = TypeVar("SettingsT")

SERVER, WORK, TRACE, LOAD, REPORT = "Server", "Work", "Traces", "Load", "Report"


class DatasetName(StrEnum):
    """What the prompts are."""

    RANDOM = "random"
    PREFIX_REPETITION = "prefix_repetition"
    SHAREGPT = "sharegpt"
    CUSTOM = "custom"
    TRACE = "trace"


class Ramp(StrEnum):
    """How a rate grows."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


def flag(
    panel: str, help_text: str, *names: str, metavar: str | None = None, show_default: bool | str = True
) -> typing.Any:
    """A typer option; its name comes from the field unless given."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, metavar=metavar, show_default=show_default)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Flags of `pdserve bench serve`."""

    # `--goodput ttft:500 tpot:50` is how vLLM's tool takes them; what follows the first arrives as arguments.
    more_slos: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="KEY:MS")] = None

    host: Annotated[str, flag(SERVER, "Of the server, unless --base-url is given.")] = "127.0.0.1"
    port: Annotated[int, flag(SERVER, "Of the server, unless --base-url is given.")] = 8000
    base_url: Annotated[str | None, flag(SERVER, "Such as http://127.0.0.1:8000.", metavar="URL")] = None
    endpoint: Annotated[str, flag(SERVER, "A path that ends with completions or chat/completions.")] = "/v1/completions"
    model: Annotated[str | None, flag(SERVER, "As the server calls it.", show_default="the first that is served")] = (
        None
    )
    api_key: Annotated[
        str | None,
        typer.Option(help="Key to send.", envvar=["PDSERVE_API_KEY", "OPENAI_API_KEY"], rich_help_panel=SERVER),
    ] = None
    header: Annotated[list[str] | None, flag(SERVER, "Header of every request; repeatable.", metavar="KEY=VALUE")] = (
        None
    )
    extra_body: Annotated[
        str | None, flag(SERVER, "JSON object of further fields of every request.", metavar="JSON")
    ] = None
    temperature: Annotated[float | None, flag(SERVER, "0 is greedy.", show_default="the server's")] = None
    top_p: Annotated[float | None, flag(SERVER, "Nucleus sampling.")] = None
    top_k: Annotated[int | None, flag(SERVER, "Sample from so many.")] = None
    ignore_eos: Annotated[
        bool | None,
        flag(SERVER, "Answers go on to their full length.", show_default="on, but for sharegpt and custom"),
    ] = None
    return_token_ids: Annotated[
        bool, flag(SERVER, "Ask for token ids, which tell how many tokens an event holds; not every server knows them.")
    ] = False
    request_timeout: Annotated[float, flag(SERVER, "Longest time of one request.", metavar="SECONDS")] = 600.0
    ready_check_timeout_sec: Annotated[float, flag(SERVER, "How long to wait for the server to answer.")] = 0.0

    dataset_name: Annotated[DatasetName, flag(WORK, "What the prompts are.")] = DatasetName.RANDOM
    dataset_path: Annotated[Path | None, flag(WORK, "File of sharegpt, custom or trace.", metavar="FILE")] = None
    num_prompts: Annotated[int | None, flag(WORK, "Requests.", show_default="100, or the whole file")] = None
    seed: Annotated[int, flag(WORK, "Makes prompts, lengths and times repeatable.")] = 0
    tokenizer: Annotated[
        str | None,
        flag(WORK, "Model folder, tokenizer.json or model name; for texts, and for ids of small vocabularies."),
    ] = None
    send_text: Annotated[
        bool, flag(WORK, "Send random prompts as text instead of token ids; needs --tokenizer. Chat always does.")
    ] = False
    input_len: Annotated[int | None, flag(WORK, "Same as --random-input-len.", metavar="TOKENS")] = None
    output_len: Annotated[int | None, flag(WORK, "Tokens of every answer, whatever the dataset.", metavar="TOKENS")] = (
        None
    )
    random_input_len: Annotated[int, flag(WORK, "Mean length of random prompts.", metavar="TOKENS")] = 1024
    random_output_len: Annotated[int, flag(WORK, "Mean length of their answers.", metavar="TOKENS")] = 128
    random_range_ratio: Annotated[
        str, flag(WORK, "Lengths go from mean * (1 - R) to mean * (1 + R); or JSON with input and output.", metavar="R")
    ] = "0"
    random_prefix_len: Annotated[int, flag(WORK, "Tokens before them that all share.", metavar="TOKENS")] = 0
    prefix_repetition_prefix_len: Annotated[int, flag(WORK, "Length of shared prefixes.", metavar="TOKENS")] = 256
    prefix_repetition_suffix_len: Annotated[int, flag(WORK, "Length of what follows them.", metavar="TOKENS")] = 256
    prefix_repetition_num_prefixes: Annotated[int, flag(WORK, "Number of shared prefixes.")] = 10
    prefix_repetition_output_len: Annotated[int, flag(WORK, "Length of their answers.", metavar="TOKENS")] = 128
    disable_shuffle: Annotated[bool, flag(WORK, "Keep the order.", "--disable-shuffle")] = False

    trace_block_size: Annotated[
        int, flag(TRACE, "Tokens for each hash id of Mooncake; its prompts shrink by 512 / this.")
    ] = 16
    trace_input_divisor: Annotated[float, flag(TRACE, "Prompts of traces without hash ids shrink by this.")] = 1.0
    trace_output_divisor: Annotated[
        float | None, flag(TRACE, "Answers shrink by this.", show_default="16 for Mooncake, else 1")
    ] = None
    trace_speed: Annotated[float, flag(TRACE, "Times as fast as recorded.")] = 1.0
    trace_spread: Annotated[
        float, flag(TRACE, "Spread requests of one time stamp evenly over so long.", metavar="SECONDS")
    ] = 0.0
    trace_start: Annotated[float, flag(TRACE, "First second to replay, as recorded.", metavar="SECONDS")] = 0.0
    trace_duration: Annotated[
        float | None, flag(TRACE, "How much to replay, as recorded.", metavar="SECONDS", show_default="to the end")
    ] = None

    request_rate: Annotated[float, flag(LOAD, "Requests per second; inf sends all at once.", show_default="inf")] = (
        math.inf
    )
    burstiness: Annotated[
        float, flag(LOAD, "Shape of the gamma distribution of the gaps: 1 is Poisson, inf a fixed rate.")
    ] = 1.0
    burst_size: Annotated[int, flag(LOAD, "Requests that arrive together; the mean rate stays.")] = 1
    ramp_up_strategy: Annotated[Ramp | None, flag(LOAD, "Let the rate grow during the run.")] = None
    ramp_up_start_rps: Annotated[float, flag(LOAD, "Rate at its start.")] = 0.0
    ramp_up_end_rps: Annotated[float, flag(LOAD, "Rate at its end.")] = 0.0
    max_concurrency: Annotated[
        int | None,
        flag(LOAD, "Most requests under way; a closed loop with --request-rate inf.", show_default="no limit"),
    ] = None
    num_warmups: Annotated[int, flag(LOAD, "Requests before, which do not count and share no prefix.")] = 0

    goodput: Annotated[
        list[str] | None, flag(REPORT, "Objectives: ttft, tpot or e2el and milliseconds.", metavar="KEY:MS ...")
    ] = None
    percentile_metrics: Annotated[str, flag(REPORT, "Of ttft, tpot, itl, e2el.")] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, flag(REPORT, "Percentiles of each.")] = "50,90,99"
    label: Annotated[str | None, flag(REPORT, "Name of this run in its files.")] = None
    metadata: Annotated[list[str] | None, flag(REPORT, "Kept in the result; repeatable.", metavar="KEY=VALUE")] = None
    save_result: Annotated[bool, flag(REPORT, "Write the result as JSON.", "--save-result")] = False
    save_detailed: Annotated[bool, flag(REPORT, "With every request.", "--save-detailed")] = False
    append_result: Annotated[bool, flag(REPORT, "Add a line to the file instead.", "--append-result")] = False
    result_dir: Annotated[Path | None, flag(REPORT, "Where to.", metavar="FOLDER")] = None
    result_filename: Annotated[str | None, flag(REPORT, "Its name.", metavar="NAME")] = None
    html: Annotated[Path | None, flag(REPORT, "Write a page with plots, which needs no network.", metavar="FILE")] = (
        None
    )
    disable_tqdm: Annotated[bool, flag(REPORT, "Show no progress.", "--disable-tqdm")] = False


def takes(settings: type[SettingsT]) -> Callable[[Callable[[SettingsT], int]], Callable[..., int]]:
    """Give a command every flag of a dataclass whose fields are annotated with typer's options."""

    def decorate(function: Callable[[SettingsT], int]) -> Callable[..., int]:
        def command(**values: object) -> int:
            return function(settings(**values))

        hints = typing.get_type_hints(settings, include_extras=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(one.name, keyword, default=one.default, annotation=hints[one.name])
                for one in fields(settings)  # type: ignore[arg-type]
            ],
            return_annotation=int,
        )
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = hints | {"return": int}
        return command

    return decorate
