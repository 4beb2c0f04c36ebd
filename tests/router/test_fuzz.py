"""Random bodies: whatever comes in, the answer is a good one or the caller's fault, and small."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai_protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.router.api_harness import MODEL, Serving, serving

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "user", "text", "none", "auto", MODEL, "\u2028", "a" * 300])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
KEYS = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "5", "x"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=10
)
ENDPOINTS = {
    "/v1/completions": ({"prompt": "red"}, CompletionBody),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, ChatBody),
    "/tokenize": ({"prompt": "red"}, TokenizeBody),
    "/detokenize": ({"tokens": [5]}, DetokenizeBody),
}
FIELDS = st.sampled_from(
    [(path, name) for path, (_, body) in ENDPOINTS.items() for name in sorted({*body.model_fields, *body.REFUSED})]
)


def test_no_body_makes_a_server_error() -> None:
    statuses: set[int] = set()

    with asyncio.Runner() as runner:
        context = serving()
        server = runner.run(context.__aenter__())

        @settings(max_examples=150, deadline=None, database=None)
        @given(FIELDS, VALUES, FIELDS, VALUES)
        def try_body(field: tuple[str, str], value: Any, other: tuple[str, str], other_value: Any) -> None:
            statuses.add(runner.run(_status(server, field[0], {field[1]: value, other[1]: other_value})))

        try:
            try_body()
            assert runner.run(server.complete()).status_code == 200
        finally:
            runner.run(context.__aexit__(None, None, None))
    assert {200, 400} <= statuses


async def _status(server: Serving, path: str, fields: dict[str, Any]) -> int:
    response = await server.client.post(path, json={**ENDPOINTS[path][0], **fields})
    assert response.status_code in (200, 400, 404), response.text[:300]
    if response.status_code != 200:
        assert response.json()["error"]["message"] and len(response.content) < 8192
    return response.status_code
