"""The cluster as a table, from a router's /debug/cluster."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "stalled": "red", "dead": "red"}


def run(url: str, api_key: str | None, *, as_json: bool) -> int:
    """Print the table, or the JSON as it came; the exit code."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(f"{address}/debug/cluster", headers=headers, timeout=10.0, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"pdserve: {address} does not answer: {error}.", file=sys.stderr)
        return 1
    if response.status_code != httpx.codes.OK:
        print(f"pdserve: {address} answers {response.status_code}: {error_message(response)}", file=sys.stderr)
        return 1
    cluster = response.json()
    if as_json:
        print(json.dumps(cluster, indent=2))
    else:
        Console().print(node_table(cluster.get("nodes", [])))
        print_counters({key: value for key, value in cluster.items() if key != "nodes"})
    return 0


def error_message(response: httpx.Response) -> str:
    """The message of OpenAI's error envelope, or what came instead."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200].strip() or response.reason_phrase


def node_table(nodes: list[dict[str, Any]]) -> Table:
    """One row per node, narrow enough for 80 columns."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("node", "state", "address"):
        table.add_column(heading, no_wrap=True)
    for heading in ("used", "cached", "blocks", "leases", "requests", "ok/failed/aborted"):
        table.add_column(heading, justify="right", no_wrap=heading != "ok/failed/aborted")
    for node in nodes:
        blocks, transfers = node.get("blocks") or {}, node.get("transfers") or {}
        state = str(node.get("state", "?")).lower()
        table.add_row(
            str(node.get("id", "?")),
            f"[{style}]{state}[/]" if (style := _STATE_STYLES.get(state)) else state,
            str(node.get("address", "?")),
            *(str(blocks.get(key, "?")) for key in ("in_use", "cached", "total")),
            *(str(node.get(key, "?")) for key in ("leases", "in_flight")),
            "/".join(str(transfers.get(key, "?")) for key in ("committed", "failed", "aborted")),
        )
    return table


def print_counters(counters: dict[str, Any], prefix: str = "") -> None:
    """The router's own counters, one a line, nested ones with dots."""
    for key, value in counters.items():
        if isinstance(value, dict):
            print_counters(value, f"{prefix}{key}.")
        else:
            print(f"{prefix}{key}: {value}")
