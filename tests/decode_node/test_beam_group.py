"""Beam search: which beams go on, against a plain search; then on a node, where beams share blocks."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Sequence
from ctypes import c_int64
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.beam_group import BeamGroup, Hypothesis, candidates
from decode_node.config import DecodeConfig
from decode_node.growth import OutputLengths
from decode_node.node import DecodeNode
from engine.config import EngineConfig, NodeConfig
from engine.errors import AttemptFailed
from engine.faults import Faults
from engine.forward_batch import ForwardBatch, SequenceSlice, build_batch
from engine.ids import BlockId
from engine.model_runner import ModelRunner
from engine.model_store import resolve_model
from engine.sampling_params import SamplingParams
from engine.sim_runner import SimRunner
from engine.tokens import FinishReason, SampledToken
from kv_transfer.wire import fingerprint_to_wire, sampling_to_wire
from proto import worker_pb2 as pb
from tests.decode_node.beam_reference import NextLogits, beam_search
from tests.node_cluster import (
    BLOCK,
    SIM_LAYOUT,
    Host,
    Router,
    alone,
    cluster,
    ended,
    engine_config,
    idle,
    sim_runner,
    until,
)
from tests.tiny_model import build_tiny_model

# Pure ----------------------------------------------------------------------------------------------------------------


def random_model(vocab_size: int, seed: int, *, spread: float = 2.0) -> NextLogits:
    """Logits that look random and follow from the text alone."""

    def next_logits(text: Sequence[int]) -> torch.Tensor:
        dice = random.Random(f"{seed} {list(text)}")
        return torch.tensor([dice.gauss(0, spread) for _ in range(vocab_size)])

    return next_logits


def search(model: NextLogits, prompt: Sequence[int], group: BeamGroup) -> tuple[tuple[Hypothesis, ...], int]:
    """Drive a group as a node does; the result, and in how many steps it was found."""
    texts = {0: list(prompt)}
    for steps in itertools.count(1):
        for slot, text in texts.items():
            assert not group.is_ready
            token = candidates(model(text), group.num_candidates)
            assert isinstance(token, SampledToken)
            group.report(slot, token.logprobs)
        assert group.is_ready
        children = group.advance()
        if group.hypotheses is not None:
            assert children == ()
            return group.hypotheses, steps
        assert len({child.slot for child in children}) == len(children)
        assert all(child.parent in texts for child in children)
        texts = {child.slot: [*texts[child.parent], child.token_id] for child in children}
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
    length_penalty=st.sampled_from((0.0, 1.0, 0.3, 2.0, -1.0)),
    num_ends=st.integers(0, 6),
    ignore_eos=st.booleans(),
    prompt_length=st.integers(1, 4),
    spread=st.sampled_from((0.5, 2.0, 6.0)),
)
def test_the_result_is_that_of_a_plain_search(
    seed: int,
    width: int,
    max_tokens: int,
    length_penalty: float,
    num_ends: int,
    ignore_eos: bool,
    prompt_length: int,
    spread: float,
) -> None:
    ends = range(num_ends)
    eos, stops = tuple(ends[::2]), tuple(ends[1::2])
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        eos_token_ids=eos,
        stop_token_ids=stops,
        ignore_eos=ignore_eos,
        logprobs=1,
    )
    group = BeamGroup(
        sampling, width=width, length_penalty=length_penalty, prompt_length=prompt_length, max_model_len=100
    )
    prompt, model = [7] * prompt_length, random_model(16, seed, spread=spread)
    hypotheses, steps = search(model, prompt, group)
    plain = beam_search(
        model,
        prompt,
        width=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        ends=stops if ignore_eos else ends,
        ignored_ends=eos if ignore_eos else (),
    )
    assert [list(each.token_ids) for each in hypotheses] == [each.token_ids for each in plain]
    assert [each.score for each in hypotheses] == [each.score for each in plain]
    assert [each.finish_reason is FinishReason.STOP for each in hypotheses] == [each.is_stopped for each in plain]
    assert steps <= max_tokens
    for each in hypotheses:
        last = each.token_ids[-1]
        named = last if last in stops and each.finish_reason is FinishReason.STOP else None
        assert each.stop_token_id == named
        assert [position[0].token_id for position in each.logprobs] == list(each.token_ids)
        assert all(len(position) == 2 and position[1].rank == 1 for position in each.logprobs)


def test_it_ends_once_no_beam_can_reach_the_result() -> None:
    # Tokens 0 and 1 end a sequence, and with them goes nearly all probability.
    logits = torch.tensor([9.0, 8.0, 1.0, 0.5, 0.1, 0.0])
    sampling = SamplingParams(temperature=0.0, max_tokens=50, eos_token_ids=(0, 1))
    group = BeamGroup(sampling, width=2, length_penalty=0.0, prompt_length=3, max_model_len=100)
    hypotheses, steps = search(lambda text: logits, [5, 5, 5], group)
    assert [each.token_ids for each in hypotheses] == [(0,), (1,)]
    assert steps == 1


def test_the_context_ends_a_search_too() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=50)
    group = BeamGroup(sampling, width=2, length_penalty=1.0, prompt_length=7, max_model_len=10)
    hypotheses, steps = search(random_model(8, 1), [5] * 7, group)
    assert steps == 3
    assert {each.finish_reason for each in hypotheses} == {FinishReason.LENGTH}


def test_a_beam_goes_on_in_its_place_and_a_second_child_takes_a_free_one() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=9)
    group = BeamGroup(sampling, width=3, length_penalty=1.0, prompt_length=1, max_model_len=100)

    def likely(*tokens: int) -> Any:
        logits = torch.full((8,), -50.0)
        for place, token in enumerate(tokens):
            logits[token] = -float(place)
        token = candidates(logits, group.num_candidates)
        assert isinstance(token, SampledToken)
        return token.logprobs

    group.report(0, likely(1, 2, 3))
    assert [(c.slot, c.parent, c.token_id) for c in group.advance()] == [(0, 0, 1), (1, 0, 2), (2, 0, 3)]
    # The second beam has nothing that is likely; the first has two children, of which one takes its place.
    group.report(0, likely(4, 5))
    assert not group.is_ready
    group.report(1, likely(6))
    group.report(2, likely(7))
    group.report(2, likely(1, 2, 3, 4, 5, 6))
    chosen = group.advance()
    assert [(c.slot, c.parent, c.token_id) for c in chosen] == [(0, 0, 4), (1, 1, 6), (2, 0, 5)]


def test_candidates_are_the_likeliest_tokens_and_of_equals_the_lowest_first() -> None:
    logits = torch.tensor([0.5, 3.0, -1.0, 3.0, 0.5, -torch.inf, 3.0])
    expected = logits.double().log_softmax(-1)
    for count, tokens in ((2, [1, 3]), (4, [1, 3, 6, 0]), (9, [1, 3, 6, 0, 4, 2, 5])):
        token = candidates(logits, count)
        assert isinstance(token, SampledToken) and token.token_id == 1
        assert [(entry.token_id, entry.rank) for entry in token.logprobs] == list(
            zip(tokens, range(1, 8), strict=False)
        )
        assert [entry.logprob for entry in token.logprobs] == pytest.approx(expected[tokens].tolist(), abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = torch.zeros(8)
    logits[3] = bad
    error = candidates(logits, 4)
    assert isinstance(error, AttemptFailed) and error.reason == "nonfinite_logits"


def test_too_few_tokens_with_a_finite_probability_are_an_error() -> None:
    group = BeamGroup(SamplingParams(max_tokens=1), width=3, length_penalty=1.0, prompt_length=1, max_model_len=9)
    logits = torch.full((8,), -torch.inf)
    logits[:2] = 0.0
    token = candidates(logits, group.num_candidates)
    assert isinstance(token, SampledToken)
    group.report(0, token.logprobs)
    with pytest.raises(AttemptFailed):
        group.advance()


# On a node -----------------------------------------------------------------------------------------------------------


def simulated(text: Sequence[int]) -> torch.Tensor:
    """Logits of the simulated model, which depend on every byte of the K/V of a text."""
    runner = sim_runner(-(-len(text) // BLOCK))
    blocks = [BlockId(block_id) for block_id in range(runner.num_blocks)]
    return runner.run(build_batch([SequenceSlice(text, 0, blocks, "last")], block_size=BLOCK))[0]


def message(
    router: Router,
    prompt: Sequence[int],
    prefill: Sequence[Host] = (),
    *,
    width: int,
    ranks: Sequence[int] | None = None,
    length_penalty: float = 1.0,
    **more: Any,
) -> pb.StartAttempt:
    start = router.message(prompt, prefill, n=width, **more)
    start.beam_search.CopyFrom(pb.BeamSearch(width=width, length_penalty=length_penalty))
    if ranks is not None:
        del start.sequences[:]
        start.sequences.extend(pb.SequenceStart(index=rank) for rank in ranks)
    return start


async def found(router: Router, start: pb.StartAttempt) -> list[list[int]]:
    streams = await router.start(start)
    await ended(streams)
    assert all(stream.error is None for stream in streams), [stream.error for stream in streams]
    return [stream.tokens for stream in streams]


@pytest.mark.parametrize("length", [3, 4, 5, 8, 17])
@pytest.mark.parametrize("is_local", [True, False])
async def test_a_node_finds_what_a_plain_search_finds(length: int, is_local: bool) -> None:
    prompt = list(range(10, 10 + length))
    async with cluster() as nodes:
        prefill = [] if is_local else [await nodes.prefill()]
        decode = await nodes.decode()
        async with nodes.router(decode) as router:
            for width, max_tokens in ((1, 3), (3, 6), (4, 9)):
                plain = beam_search(simulated, prompt, width=width, max_tokens=max_tokens)
                start = message(router, prompt, prefill, width=width, max_tokens=max_tokens)
                assert await found(router, start) == [each.token_ids for each in plain]
            assert decode.node.pool.counts.in_use == 0
            if not is_local:
                assert decode.node.status().prefill_tokens_computed == 0


async def test_end_tokens_logprobs_and_ranks_are_as_asked_for() -> None:
    prompt = list(range(10, 19))
    ends = tuple(range(0, 512, 9))
    async with cluster() as nodes:
        decode = await nodes.decode()
        async with nodes.router(decode) as router:
            plain = beam_search(simulated, prompt, width=3, max_tokens=7, length_penalty=0.2, ends=ends)
            assert any(each.is_stopped for each in plain)
            start = message(
                router, prompt, width=3, ranks=[2, 0], max_tokens=7, length_penalty=0.2, eos_token_ids=ends, logprobs=2
            )
            third, first = await router.start(start)
            await ended([third, first])
            assert [third.tokens, first.tokens] == [plain[2].token_ids, plain[0].token_ids]
            stop, length = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
            assert first.finish_reason == (stop if plain[0].is_stopped else length)
            assert decode.node.status().tokens_generated == len(third.tokens) + len(first.tokens)


async def test_beams_share_their_blocks() -> None:
    prompt = list(range(10, 10 + 10 * BLOCK))
    async with cluster() as nodes:
        decode = await nodes.decode(sim_runner(256, step_s=0.01))
        async with nodes.router(decode) as router:
            start = message(router, prompt, width=8, max_tokens=3 * BLOCK)
            streams = await router.start(start)
            held: list[tuple[int, int]] = []
            while not all(stream.ended.is_set() for stream in streams):
                beams = [sequence for sequence in decode.node._by_sequence if sequence.is_running]
                held.append((decode.node.pool.counts.in_use, sum(len(beam.block_ids) for beam in beams)))
                await asyncio.sleep(0.003)
            shared, apart = max(held, key=lambda counts: counts[1])
            assert apart >= 8 * 11, "eight beams of eleven blocks and more"
            # Ten blocks of prompt once, and at most three of output for each beam.
            assert shared <= 10 + 8 * 3
            assert shared < apart / 2
        await idle([decode])


async def test_a_beam_that_is_computed_again_reports_once() -> None:
    """Both of two beams lose their blocks, the later one before its report and with a copy; they come back together."""
    prompt = list(range(10, 20))
    runner = sim_runner(40)
    config = DecodeConfig(node=NodeConfig(engine=engine_config(40)), swap_space_gib=1.0)
    identity = pb.NodeIdentity(node_id="decode", epoch=1)
    description = pb.NodeDescription(
        identity=identity, fingerprint=fingerprint_to_wire(runner.fingerprint), vocab_size=runner.vocab_size
    )
    node = DecodeNode(config, runner, description, Faults({}))

    def step() -> bool:
        decision = node._decide()
        if decision is not None:
            node._commit(decision, node._run(decision))
        return decision is not None

    session = node.open_session("router")
    start = pb.StartAttempt(
        attempt_id="search",
        decode_node=identity,
        deadline_ms=10**7,
        prompt_token_ids=prompt,
        sampling=sampling_to_wire(SamplingParams(temperature=0.0, max_tokens=20)),
        sequences=[pb.SequenceStart(index=index) for index in range(2)],
        beam_search=pb.BeamSearch(width=2, length_penalty=1.0),
    )
    node.start(start, session)
    for _ in range(6):
        step()
    scheduler = node.scheduler
    early, late = sorted(node._by_sequence, key=lambda beam: beam.arrival)
    scheduler._preempt(late)
    kept_back, scheduler._waiting = scheduler._waiting, []
    step()  # The first reports alone.
    scheduler._waiting = kept_back
    scheduler.host_copies._max_bytes = scheduler.host_copies.num_bytes  # No room for another copy.
    scheduler._preempt(early)
    while step():
        pass
    expected = beam_search(simulated, prompt, width=2, max_tokens=20)
    tokens = [list(session.sequence_update("search", index).token_ids) for index in range(2)]
    assert tokens == [each.token_ids for each in expected]
    assert node.pool.counts.in_use == 0


class Gated(SimRunner):
    """Computes nothing before its gate is open."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, layout=SIM_LAYOUT)
        self.gate = threading.Event()

    def run(self, batch: ForwardBatch, *, layers_done: c_int64 | None = None) -> torch.Tensor:
        self.gate.wait(10)
        return super().run(batch, layers_done=layers_done)


@pytest.mark.parametrize("num_blocks", [16, 21])
@pytest.mark.parametrize("way_back", ["recompute", "swap", "prefill node"])
async def test_searches_and_streams_that_do_not_fit_together_take_turns(num_blocks: int, way_back: str) -> None:
    """Beams lose their blocks in the middle of a step, wait for each other, and make way."""
    prompts = [list(range(start, start + 7)) for start in (10, 40, 70, 100)]
    plain = [
        [each.token_ids for each in beam_search(simulated, prompt, width=3, max_tokens=12)] for prompt in prompts[:3]
    ]
    async with cluster() as nodes:
        prefill = [await nodes.prefill()] if way_back == "prefill node" else []
        runner = Gated(num_blocks)
        decode = await nodes.decode(runner, swap_space_gib=1.0 if way_back == "swap" else 0.0)
        # Nothing is known of lengths, so that much too much is admitted.
        decode.node.scheduler.lengths = OutputLengths(prior=1)
        async with nodes.router(decode) as router:
            streams = [
                await router.start(message(router, prompt, prefill, width=3, max_tokens=12)) for prompt in prompts[:3]
            ]
            streams.append(await router.start(router.message(prompts[3], prefill, max_tokens=30)))
            await until(lambda: decode.node.status().in_flight == 4)
            runner.gate.set()
            await ended([stream for group in streams for stream in group])
            assert [[stream.tokens for stream in group] for group in streams[:3]] == plain
            assert streams[3][0].tokens == alone(prompts[3], 30)
            # How far they have got when hand-offs commit is a matter of chance.
            assert decode.node.status().preemptions > 0 or prefill


@pytest.mark.parametrize("after_s", [0.0, 0.015, 0.04, 0.08])
async def test_a_cancelled_search_frees_everything(after_s: float) -> None:
    async with cluster() as nodes:
        prefill = await nodes.prefill(sim_runner(step_s=0.01))
        decode = await nodes.decode(sim_runner(step_s=0.01))
        async with nodes.router(decode) as router:
            start = message(router, range(10, 30), [prefill], width=4, max_tokens=20)
            streams = await router.start(start)
            await asyncio.sleep(after_s)
            await router.cancel(start, 1)
            await asyncio.wait_for(streams[1].ended.wait(), 5)
            assert streams[1].finish_reason == pb.FINISH_REASON_CANCELLED
            assert not streams[0].ended.is_set(), "others are still wanted"
            await router.cancel(start)
            await ended(streams)
            assert {stream.finish_reason for stream in streams} == {pb.FINISH_REASON_CANCELLED}
            assert all(not stream.tokens for stream in streams)
            await idle([prefill, decode])


async def test_a_search_outlives_its_prefill_node() -> None:
    async with cluster() as nodes:
        lost = await nodes.prefill(sim_runner(step_s=0.05), engine={"max_num_batched_tokens": 4})
        decode = await nodes.decode()
        async with nodes.router(decode) as router:
            prompt = list(range(10, 40))
            start = message(router, prompt, [lost], width=3, max_tokens=4)
            streams = await router.start(start)
            await until(lambda: lost.node.status().running_sequences)
            await nodes.crash(lost)
            await ended(streams)
            plain = beam_search(simulated, prompt, width=3, max_tokens=4)
            assert [stream.tokens for stream in streams] == [each.token_ids for each in plain]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"width": 0, "ranks": [0]}, "n"),
        ({"width": 2, "ranks": [2]}, "n"),
        ({"width": 40}, "n"),
        ({"width": 4, "max_tokens": 150}, "n"),
        ({"width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"width": 2, "length_penalty": 1000.0}, "length_penalty"),
        ({"width": 1, "output": [5]}, "n"),
    ],
)
async def test_a_search_that_can_never_run_is_refused(changes: dict[str, Any], param: str) -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(sim_runner(64))
        async with nodes.router(decode) as router:
            start = message(router, range(10, 30), **{"width": 2, **changes})
            streams = await router.start(start)
            await ended(streams)
            assert {stream.failure for stream in streams} == {"invalid_request"}
            assert {stream.error.param for stream in streams if stream.error is not None} == {param}


# With a model --------------------------------------------------------------------------------------------------------


async def test_a_real_model_gives_what_its_logits_in_transformers_give(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = build_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def next_logits(text: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([list(text)])).logits[0, -1]
        return logits

    prompt = [5, 77, 130, 9, 41, 200, 33]
    config = EngineConfig(model=str(folder), dtype="float32", block_size=BLOCK, num_blocks=64)
    files = resolve_model(str(folder))
    async with cluster() as nodes:
        prefill, decode = (
            await nodes.prefill(ModelRunner(config, files)),
            await nodes.decode(ModelRunner(config, files)),
        )
        async with nodes.router(decode) as router:
            for width, length_penalty, ends in ((4, 1.0, ()), (3, 0.0, (0, 2)), (2, 2.0, tuple(range(0, 320, 7)))):
                plain = beam_search(
                    next_logits, prompt, width=width, max_tokens=8, length_penalty=length_penalty, ends=ends
                )
                start = message(
                    router,
                    prompt,
                    [prefill],
                    width=width,
                    max_tokens=8,
                    length_penalty=length_penalty,
                    eos_token_ids=ends,
                )
                assert await found(router, start) == [each.token_ids for each in plain]
