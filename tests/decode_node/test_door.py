"""What a decode node refuses, and which field of the request it names."""

from __future__ import annotations

import pytest

from decode_node.door import Door
from engine.errors import InvalidRequest
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams
from kv_transfer.wire import sampling_to_wire
from proto import worker_pb2 as pb

IDENTITY = pb.NodeIdentity(node_id="decode-0", epoch=1)
LAYOUT = KvLayout(num_layers=1, kv_heads=1, head_dim=2, block_size=4, dtype="float32")
DOOR = Door(
    identity=IDENTITY,
    layout=LAYOUT,
    num_blocks=24,
    vocab_size=7,
    max_model_len=64,
    max_num_seqs=8,
    by_priority=True,
)


def search(*, n: int, width: int, max_tokens: int = 4) -> pb.StartAttempt:
    return pb.StartAttempt(
        decode_node=IDENTITY,
        prompt_token_ids=[1, 2, 3],
        sampling=sampling_to_wire(SamplingParams(max_tokens=max_tokens)),
        sequences=[pb.SequenceStart(index=rank) for rank in range(n)],
        beam_search=pb.BeamSearch(width=width, length_penalty=1.0),
    )


@pytest.mark.parametrize(
    ("width", "max_tokens", "reason"),
    [(9, 4, "at once"), (8, 4, "more beams than tokens"), (7, 14, "more KV blocks")],
)
def test_too_many_beams_are_blamed_on_the_field_that_asked_for_them(width: int, max_tokens: int, reason: str) -> None:
    DOOR.check(search(n=2, width=2))
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        DOOR.check(search(n=2, width=width, max_tokens=max_tokens))
    assert refusal.value.param == "best_of"


def test_as_many_beams_as_results_are_blamed_on_n() -> None:
    with pytest.raises(InvalidRequest, match="more KV blocks") as refusal:
        DOOR.check(search(n=7, width=7, max_tokens=14))
    assert refusal.value.param == "n"
