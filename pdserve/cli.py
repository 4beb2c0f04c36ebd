"""The command line: which commands there are, and how a failure becomes one sentence and an exit code.

Exit codes: 0 done, 1 it failed while running, 2 a setting, a model or the machine cannot work, 130 interrupted.
Imports nothing heavy: what a command needs, it imports when it runs.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from bench.cli import app as bench
from engine.errors import ConfigError
from pdserve import tether
from pdserve.options import (
    DecodeOptions,
    PrefillOptions,
    RouterOptions,
    ServeOptions,
    refuse_foreign_kernels,
    takes,
)

EPILOG = (
    "Every option is also an environment variable (--max-num-seqs: PDSERVE_MAX_NUM_SEQS) and a key of the YAML file "
    "given with --config (max-num-seqs: 32). A flag wins over the environment, the environment over the file."
)

app = typer.Typer(
    name="pdserve",
    help="Serve large language models with prefill and decode on separate nodes.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[str, typer.Option("--url", envvar="PDSERVE_URL", help="Where the router listens.", metavar="URL")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["PDSERVE_API_KEY", "OPENAI_API_KEY"],
        help="Key to send.",
        metavar="KEY",
        show_default=False,
    ),
]


@app.command(epilog=EPILOG)
@takes(ServeOptions)
def serve(options: ServeOptions) -> int:
    """Serve a model on this machine: Redis, router, prefill and decode nodes, all started and stopped together."""
    from pdserve import launcher

    _set_up_logging(options.log_level)
    return launcher.run(options)


@app.command(epilog=EPILOG)
@takes(RouterOptions)
def router(options: RouterOptions) -> int:
    """Run one router: the HTTP and gRPC front door of a cluster."""
    refuse_foreign_kernels()
    _set_up_logging(options.log_level)
    config = options.router_config(
        redis_url=options.redis_url, cluster=options.cluster, cluster_token=options.cluster_token
    )
    from router.server import run

    return run(config)


@app.command(epilog=EPILOG)
@takes(PrefillOptions)
def prefill(options: PrefillOptions) -> int:
    """Run one prefill node: prompts in, KV blocks and the first token out."""
    refuse_foreign_kernels()
    _set_up_logging(options.log_level)
    config = options.prefill_config()
    from prefill_node.server import run

    return run(config)


@app.command(epilog=EPILOG)
@takes(DecodeOptions)
def decode(options: DecodeOptions) -> int:
    """Run one decode node: KV blocks in, tokens out."""
    refuse_foreign_kernels()
    _set_up_logging(options.log_level)
    config = options.decode_config()
    from decode_node.server import run

    return run(config)


@app.command()
def chat(
    url: Url = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None,
        typer.Option("--model", envvar="PDSERVE_MODEL", help="Model to ask.", show_default="the first that is served"),
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.", metavar="TEXT")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.", min=0.0)] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling.", min=0.0, max=1.0)] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer.", min=1)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes answers repeatable.")] = None,
) -> int:
    """Chat in the terminal with any server that speaks OpenAI's protocol."""
    from pdserve.chat import ChatSettings, run

    return run(ChatSettings(url, model, api_key, system, temperature, top_p, max_tokens, seed))


@app.command()
def status(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Show the cluster as a table: its nodes, their blocks, leases and transfers."""
    from pdserve.status import run

    return run(url, api_key, as_json=as_json)


@app.command()
def health(
    url: Annotated[
        str | None,
        typer.Option("--url", envvar="PDSERVE_HEALTH_URL", help="A router, such as http://127.0.0.1:8000."),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option("--grpc", envvar="PDSERVE_HEALTH_GRPC", help="A node, such as 127.0.0.1:7001.", metavar="ADDRESS"),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="How long to wait.", metavar="SECONDS")] = 3.0,
) -> int:
    """Ask a router or a node whether it can serve now: exit code 0 if so. Made for container health checks."""
    from pdserve.health import check_grpc, check_http

    if (url is None) == (grpc is None):
        raise typer.BadParameter("give either --url or --grpc")
    problem = check_http(url, timeout) if url is not None else check_grpc(str(grpc), timeout)
    if problem is not None:
        print(f"pdserve: {problem}", file=sys.stderr)
        return 1
    return 0


app.add_typer(bench)


@app.command()
def version() -> int:
    """Print the version."""
    from importlib import metadata

    print(metadata.version("pdserve"))
    return 0


def _set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    tether.follow_parent_from_environment()
    try:
        code = app(arguments, prog_name="pdserve", standalone_mode=False)
    except typer.TyperException as error:
        _end(_sentence(error), getattr(error, "exit_code", 2))
    except ConfigError as error:
        _end(str(error), 1 if error.reason == "port_taken" else 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    sys.exit(code or 0)


def _sentence(error: typer.TyperException) -> str:
    describe = getattr(error, "format_message", None)
    text = " ".join(str(describe() if describe is not None else error).split())
    return re.sub(r"^Invalid value(?: for '(\S+)')?: ", lambda match: f"{match[1]}: " if match[1] else "", text)


def _end(sentence: str, code: int) -> None:
    print(f"pdserve: {sentence}" if sentence.endswith((".", "?")) else f"pdserve: {sentence}.", file=sys.stderr)
    sys.exit(code)
