"""The `pdserve bench` commands: which there are and which flags each takes. What one needs, it imports when it runs."""

from __future__ import annotations

import typer

from bench import local_cli
from bench.peers_options import PeersSettings
from bench.serve_options import ServeSettings, takes

app = typer.Typer(
    name="bench",
    help="Measure servers: load on any OpenAI-compatible URL, peers side by side, kernels and the engine alone.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@takes(ServeSettings)
def serve(settings: ServeSettings) -> int:
    """Send load to any server that speaks OpenAI's protocol, and report latency, throughput and goodput."""
    from bench.serve_command import run

    return run(settings)


@app.command()
@takes(PeersSettings)
def peers(settings: PeersSettings) -> int:
    """Run the same work on this engine and its peers in turns, and print the ratios."""
    from bench.peers_command import run

    return run(settings)


# Commands of other modules of bench hook in here, one line each: app.command("kernels")(function). Such a module is
# imported by every `pdserve` call, so it must not import torch at its top.
app.command("kernels")(local_cli.kernels)
app.command("engine")(local_cli.engine)
app.command("claims")(local_cli.claims)
