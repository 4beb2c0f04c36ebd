"""What goes up to a router in one message, and when."""

from __future__ import annotations

from decode_node import session as session_module
from decode_node.session import Session
from proto import worker_pb2 as pb


async def test_updates_of_a_step_go_together_and_only_once() -> None:
    session = Session("router", pb.NodeIdentity(node_id="decode-0", epoch=1))
    session.sequence_update("a", 0).token_ids.append(1)
    session.sequence_update("a", 0).token_ids.append(2)
    session.attempt_update("a").cached_tokens = 16
    session.flush()
    message = await session.next_message()
    assert [list(update.token_ids) for update in message.sequences] == [[1, 2]]
    assert message.attempts[0].cached_tokens == 16
    assert not (await session.next_message()).sequences


async def test_silence_gives_a_sign_of_life() -> None:
    session = Session("router", pb.NodeIdentity(node_id="decode-0", epoch=1))
    message = await session.next_message()
    assert message.identity.node_id == "decode-0"
    assert not message.sequences


async def test_what_does_not_fit_goes_with_the_next_message() -> None:
    session = Session("router", pb.NodeIdentity(node_id="decode-0", epoch=1))
    tokens_of_a_large_update = session_module._MAX_MESSAGE_BYTES // 3
    for number in range(3):
        session.sequence_update(f"attempt-{number}", 0).token_ids.extend([1000] * tokens_of_a_large_update)
    session.flush()
    first, second = await session.next_message(), await session.next_message()
    assert [update.attempt_id for update in first.sequences] == ["attempt-0", "attempt-1"]
    assert [update.attempt_id for update in second.sequences] == ["attempt-2"]
    assert first.ByteSize() < 2 * session_module._MAX_MESSAGE_BYTES
