"""Compares a whole cluster with transformers' `generate`, token by token: cold, from the prefix cache, and in a crowd.

Prompts come from a folder of texts: half of them cut to lengths around the block size, some long, the rest as they are.
All are sent at once, greedy and in float32, and again, so that prefixes are found. Then seeded sampling is asked for
alone and in the crowd. transformers runs first, by itself, from the same checkpoint folder.

    python -m bench.parity --model FOLDER --prompts FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.server import pdserve_command, started_server

NEAR_TIE = 1e-4
"""Below this gap of the two best logits, two right ways of adding in float32 may choose differently."""

TEXT_FIELDS = ("text", "prompt", "question", "content", "s")
NATURAL_TOKENS = 400
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
REQUEST_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent: the text where there is one, so that the router's tokenizer is compared too, else the ids."""

    source: str
    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers generated, and by how much each token won over the second best."""

    token_ids: list[int]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the cluster generated."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token of an answer that differs; what follows it has another history and is not compared."""

    run: str
    source: str
    prompt_tokens: int
    position: int
    expected: int
    got: int
    gap: float
    is_near_tie: bool


def read_texts(path: Path) -> Iterator[str]:
    """Texts of a .jsonl file, one a line, or the paragraphs of a .txt file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = _text_of(json.loads(line)) if path.suffix == ".jsonl" and line else line
        if text:
            yield text


def _text_of(record: dict[str, Any]) -> str:
    for field in TEXT_FIELDS:
        if isinstance(record.get(field), str):
            return str(record[field])
    if record.get("turns"):
        return str(record["turns"][0])
    return str(record["messages"][-1]["content"]) if record.get("messages") else ""


def make_prompts(
    folder: Path, tokenizer: Any, *, count: int, long_count: int, long_tokens: int, block: int
) -> list[Prompt]:
    """`count` prompts that go round the files, so that every script has several lengths."""
    choose = random.Random(0)
    texts = {
        path.stem: list(read_texts(path)) for path in sorted(folder.rglob("*")) if path.suffix in (".jsonl", ".txt")
    }
    sources = list(texts)
    if not sources:
        raise SystemExit(f"{folder} has no .jsonl or .txt files.")
    encoded = {name: _encode(tokenizer, "\n".join(lines)[:60_000]) for name, lines in texts.items()}

    def cut(name: str, length: int) -> Prompt:
        ids = encoded[name]
        first = choose.randrange(max(1, len(ids) - length))
        return Prompt(f"{name}:{length}", ids[first : first + length])

    prompts: list[Prompt] = []
    long_sources = [name for name in sources if len(encoded[name]) > long_tokens]
    prompts += [cut(name, long_tokens) for name in choose.sample(long_sources, min(long_count, len(long_sources)))]
    lengths = (1, block - 1, block, block + 1, 2 * block)
    for index in range(count // 2):
        prompts.append(cut(sources[index % len(sources)], lengths[index % len(lengths)]))
    while len(prompts) < count:
        name = sources[len(prompts) % len(sources)]
        text = choose.choice(texts[name])
        if 0 < len(ids := _encode(tokenizer, text)) <= NATURAL_TOKENS:
            prompts.append(Prompt(f"{name}:natural", ids, text))
    return prompts


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def expected_of(arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> list[Expected]:
    """What transformers generates; read from the file of an earlier run where there is one."""
    key = [arguments.new_tokens, *(prompt.token_ids for prompt in prompts)]
    kept: Path | None = arguments.reference
    if kept is not None and kept.exists():
        content = json.loads(kept.read_text(encoding="utf-8"))
        if content["key"] != key:
            raise SystemExit(f"{kept} is of other prompts.")
        return [Expected(**one) for one in content["expected"]]
    expected = generate_all(arguments.model, prompts, arguments.new_tokens)
    if kept is not None:
        kept.write_text(json.dumps({"key": key, "expected": [asdict(one) for one in expected]}), encoding="utf-8")
    return expected


def generate_all(folder: Path, prompts: Sequence[Prompt], new_tokens: int) -> list[Expected]:
    """Each prompt by itself, greedy, through transformers in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    expected: list[Expected] = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(output.logits)[:, 0].topk(2).values  # [new_tokens, 2]
        expected.append(Expected(output.sequences[0, ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return expected


class Client:
    """Asks one router."""

    def __init__(self, url: str, model: str, new_tokens: int) -> None:
        self._url = url
        self._common = {"model": model, "max_tokens": new_tokens, "ignore_eos": True, "return_token_ids": True}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits)

    async def complete(self, prompt: Prompt, **sampling: Any) -> Answer:
        """One completion; greedy, unless `sampling` says otherwise."""
        body = {"temperature": 0, **self._common, **sampling, "prompt": prompt.text or prompt.token_ids}
        reply = await self._http.post(f"{self._url}/completions", json=body)
        if reply.status_code != httpx.codes.OK:
            raise ConnectionError(f"{prompt.source} was answered with {reply.status_code}: {reply.text[:500]}")
        answer = reply.json()
        choice, details = answer["choices"][0], answer["usage"].get("prompt_tokens_details") or {}
        return Answer(choice["prompt_token_ids"], choice["token_ids"], details.get("cached_tokens") or 0)

    async def complete_all(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """All at once."""
        return await asyncio.gather(*(self.complete(prompt) for prompt in prompts))

    async def nodes(self) -> list[dict[str, Any]]:
        """What the router says of each node."""
        reply = await self._http.get(f"{self._url.removesuffix('/v1')}/debug/cluster")
        nodes: list[dict[str, Any]] = reply.json()["nodes"]
        return nodes

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()


def compare(
    run: str, prompts: Sequence[Prompt], expected: Sequence[Expected], answers: Sequence[Answer]
) -> tuple[int, list[Mismatch]]:
    """How many tokens were compared, and the first that differs of each prompt."""
    compared, mismatches = 0, []
    for prompt, want, answer in zip(prompts, expected, answers, strict=True):
        if len(answer.token_ids) != len(want.token_ids):
            raise ValueError(f"{prompt.source} has {len(answer.token_ids)} tokens instead of {len(want.token_ids)}.")
        for position, (right, got) in enumerate(zip(want.token_ids, answer.token_ids, strict=True)):
            compared += 1
            if right != got:
                gap = want.gaps[position]
                found = Mismatch(
                    run, prompt.source, len(prompt.token_ids), position, right, got, gap, is_near_tie=gap < NEAR_TIE
                )
                mismatches.append(found)
                break
    return compared, mismatches


async def compare_sampling(client: Client, prompts: Sequence[Prompt], count: int) -> dict[str, Any]:
    """Whether seeded answers are the same alone and while all other prompts run."""
    chosen = random.Random(1).sample(list(prompts), count)
    alone = [await client.complete(prompt, seed=seed, **SAMPLING) for seed, prompt in enumerate(chosen)]
    crowd = asyncio.create_task(client.complete_all(prompts))
    crowded = await asyncio.gather(
        *(client.complete(prompt, seed=seed, **SAMPLING) for seed, prompt in enumerate(chosen))
    )
    await crowd
    different = [
        prompt.source
        for prompt, one, other in zip(chosen, alone, crowded, strict=True)
        if one.token_ids != other.token_ids
    ]
    return {"prompts": count, "tokens": sum(len(answer.token_ids) for answer in alone), "different": different}


async def ask_cluster(
    url: str, model: str, prompts: Sequence[Prompt], expected: Sequence[Expected], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Every comparison, and what the nodes counted meanwhile."""
    client = Client(url, model, arguments.new_tokens)
    try:
        summary: dict[str, Any] = {}
        for run in ("cold", "again"):
            started_s = time.monotonic()
            answers = await client.complete_all(prompts)
            compared, mismatches = compare(run, prompts, expected, answers)
            summary[run] = {
                "tokens_compared": compared,
                "mismatches": [asdict(mismatch) for mismatch in mismatches],
                "tokenised_differently": [
                    prompt.source
                    for prompt, answer in zip(prompts, answers, strict=True)
                    if prompt.token_ids != answer.prompt_token_ids
                ],
                "cached_tokens": sum(answer.cached_tokens for answer in answers),
                "seconds": round(time.monotonic() - started_s, 1),
            }
        summary["seeded_sampling"] = await compare_sampling(client, prompts, arguments.sampled)
        nodes = await client.nodes()
    finally:
        await client.close()
    summary["transfers"] = {
        name: sum(node["transfers"][name] for node in nodes if node["role"] == "decode")
        for name in ("started", "committed", "failed", "aborted")
    }
    summary["failures"] = dict(sum((Counter(node["failures"]) for node in nodes), Counter()))
    summary["preemptions"] = sum(node["preemptions"] for node in nodes)
    return summary


def has_passed(summary: dict[str, Any]) -> bool:
    """Whether every token is equal."""
    runs = [summary["cold"], summary["again"]]
    return (
        not any(run["mismatches"] or run["tokenised_differently"] for run in runs)
        and not (summary["seeded_sampling"]["different"])
    )


def parse_arguments() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder, Hugging Face style")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of .jsonl and .txt files")
    parser.add_argument("--count", type=int, default=64, help="prompts (64)")
    parser.add_argument("--long-count", type=int, default=6, help="how many of them are long (6)")
    parser.add_argument("--long-tokens", type=int, default=1500, help="tokens of a long one (1500)")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens generated for each (24)")
    parser.add_argument("--sampled", type=int, default=12, help="prompts sampled alone and in the crowd (12)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block (16)")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of each role (2)")
    parser.add_argument("--reference", type=Path, help="file that keeps what transformers generated for the next run")
    parser.add_argument("serve_flags", nargs="*", help="more flags of `pdserve serve`, after --")
    return parser.parse_args()


def main() -> int:
    """Print the summary as JSON; 1 when any token differs."""
    arguments = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    prompts = make_prompts(
        arguments.prompts,
        tokenizer,
        count=arguments.count,
        long_count=arguments.long_count,
        long_tokens=arguments.long_tokens,
        block=arguments.block_size,
    )
    started_s = time.monotonic()
    expected = expected_of(arguments, prompts)
    print(f"transformers: {len(prompts)} prompts in {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    flags = [f"--prefill-nodes={arguments.nodes}", f"--decode-nodes={arguments.nodes}"]
    flags += ["--dtype=float32", f"--block-size={arguments.block_size}", *arguments.serve_flags]
    with started_server(pdserve_command(str(arguments.model), *flags)) as server:
        summary = asyncio.run(ask_cluster(server.url, server.model, prompts, expected, arguments))
    gaps = sorted(gap for one in expected for gap in one.gaps)
    facts = {
        "prompts": len(prompts),
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        "new_tokens": arguments.new_tokens,
        "smallest_gaps": [round(gap, 6) for gap in gaps[:5]],
    }
    print(json.dumps(facts | summary, indent=1, ensure_ascii=False))
    return 0 if has_passed(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
