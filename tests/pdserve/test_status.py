"""The table of the cluster."""

from __future__ import annotations

import json

import httpx
import pytest
from rich.console import Console

from pdserve import status

CLUSTER = {
    "nodes": [
        {
            "id": "decode-0",
            "role": "decode",
            "pid": 42,
            "epoch": 7,
            "address": "127.0.0.1:20001",
            "state": "ready",
            "blocks": {"total": 64, "free": 60, "cached": 3, "in_use": 1},
            "leases": 0,
            "transfers": {"started": 9, "committed": 7, "failed": 1, "aborted": 1},
            "in_flight": 2,
            "last_step_age_s": 0.25,
        },
        {"id": "prefill-0", "role": "prefill", "address": "127.0.0.1:20002", "state": "dead", "last_step_age_s": None},
    ],
    "router": {"requests": {"finished": 5}},
}


def test_table_has_a_row_per_node_and_survives_what_is_missing() -> None:
    console = Console(width=80, record=True, file=None)
    with console.capture() as captured:
        console.print(status.node_table(CLUSTER["nodes"]))  # type: ignore[arg-type]
    rows = [line.split() for line in captured.get().splitlines()]
    assert " ".join(rows[1]) == "decode-0 ready 127.0.0.1:20001 1 3 64 0 2 7/1/1"
    assert rows[2][:2] == ["prefill-0", "dead"]
    assert rows[2][-1] == "?/?/?"


def test_json_comes_as_it_is_and_failures_are_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def get(url: str, *, headers: dict[str, str], **_: object) -> httpx.Response:
        asked.append((url, headers))
        if len(asked) == 1:
            return httpx.Response(200, json=CLUSTER)
        return httpx.Response(401, json={"error": {"message": "the key is wrong"}})

    monkeypatch.setattr(httpx, "get", get)
    assert status.run("http://here:1/v1/", "key", as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == CLUSTER
    assert asked == [("http://here:1/debug/cluster", {"Authorization": "Bearer key"})]
    assert status.run("http://here:1", None, as_json=False) == 1
    assert capsys.readouterr().err == "pdserve: http://here:1 answers 401: the key is wrong\n"
