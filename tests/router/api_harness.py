"""The HTTP API over a scripted cluster and a small tokenizer, on a real socket, for tests of what clients see."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from router.config import RouterConfig
from router.generation import ModelLimits
from router.http_server import HttpServer, listen
from router.inference_api import InferenceApi
from router.metrics import RouterMetrics
from router.testing import FakeCluster, FakeGeneration, ScriptedSequence

MODEL = "tiny"
END_OF_TEXT, IM_START, IM_END = range(3)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LIMITS = ModelLimits(vocab_size=512, max_model_len=256, block_size=16, max_request_blocks=64, max_sequences=128)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, so that every text has tokens, with ChatML's special ones."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the red fox and the blue sea", "one two three four five"], trainer)
    return Tokenizer(backend, eos_token_ids=(END_OF_TEXT, IM_END), bos_token_id=None)


def saying(text: str, **rest: Any) -> ScriptedSequence:
    """A script that says `text` and then ends its turn."""
    return ScriptedSequence((*tokenizer().encode(text), IM_END), **rest)


@dataclass
class Serving:
    """A server that runs, and what it runs on."""

    api: InferenceApi
    cluster: FakeCluster
    client: httpx.AsyncClient
    http: HttpServer

    @property
    def port(self) -> int:
        return self.http.port

    @property
    def last(self) -> FakeGeneration:
        """The latest generation that the cluster was asked for."""
        return self.cluster.generations[-1]

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "red", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **body})


@asynccontextmanager
async def serving(
    script: Any = None, *, cluster: FakeCluster | None = None, keys: Sequence[str] = (), **settings: Any
) -> AsyncIterator[Serving]:
    """A server on a free port; afterwards nothing of any request may be left."""
    cluster = cluster or FakeCluster(script=saying("the blue sea") if script is None else script, model_limits=LIMITS)
    config = RouterConfig(model=MODEL, port=0, api_keys=tuple(keys), **settings)
    template = ChatTemplate({"default": CHATML}, {})
    api = InferenceApi(config, tokenizer(), template, cluster, RouterMetrics(CollectorRegistry(), model_name=MODEL))
    listener = listen("127.0.0.1", 0)
    server = HttpServer(api, listener)
    await server.start()
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=10.0, trust_env=False
        ) as client:
            yield Serving(api, cluster, client, server)
    finally:
        await server.stop()
        listener.close()
        api.close()
    assert api.num_running == 0
    assert cluster.open_generations == []


def events(text: str) -> list[Any]:
    """The data of each event of a stream, as JSON where it is."""
    found: list[Any] = []
    for part in text.split("\n\n"):
        if part:
            assert part.startswith("data: "), part
            found.append(part[6:] if part == "data: [DONE]" else json.loads(part[6:]))
    return found


def joined(chunks: Sequence[Any], index: int = 0) -> str:
    """The text of one choice of a stream of either kind."""
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def finish_reasons(chunks: Sequence[Any], index: int = 0) -> list[str]:
    """The finish reasons of one choice of a stream that are not null."""
    return [
        choice["finish_reason"]
        for chunk in chunks
        if isinstance(chunk, dict)
        for choice in chunk["choices"]
        if choice["index"] == index and choice["finish_reason"] is not None
    ]
