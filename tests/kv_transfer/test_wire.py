"""Does everything survive the wire, and is nonsense refused by name?"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import (
    AttemptFailed,
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PdserveError,
    Unavailable,
)
from engine.fingerprint import Fingerprint
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams
from engine.tokens import FinishReason, TokenLogprob
from kv_transfer import wire
from proto import worker_pb2 as pb

TOKEN_IDS = st.integers(0, 2**32 - 1)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**31 - 1))
    return SamplingParams(
        temperature=draw(st.floats(0, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(0.01, 10)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        seed=draw(st.integers(0, 2**64 - 1)),
        logit_bias=draw(st.dictionaries(TOKEN_IDS, st.floats(-100, 100), max_size=5)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=tuple(draw(st.lists(TOKEN_IDS, max_size=5))),
        eos_token_ids=tuple(draw(st.lists(TOKEN_IDS, max_size=5))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
    )


@given(sampling_params())
def test_sampling_survives_as_rounded_by_the_sender(params: SamplingParams) -> None:
    exact = wire.float32_exact(params)
    message = pb.SamplingParams.FromString(wire.sampling_to_wire(params).SerializeToString())
    received = wire.sampling_from_wire(message)
    assert received == exact
    # A second hop (decode to prefill) changes nothing more.
    assert wire.sampling_from_wire(wire.sampling_to_wire(received)) == exact
    for field in ("temperature", "top_p", "repetition_penalty"):
        assert math.isclose(getattr(exact, field), getattr(params, field), rel_tol=1e-6, abs_tol=1e-44)


def test_values_at_the_edge_of_a_range_stay_inside_it() -> None:
    exact = wire.float32_exact(SamplingParams(repetition_penalty=0.01, top_p=1e-300))
    assert exact.repetition_penalty >= 0.01
    assert exact.top_p > 0


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"min_p": math.inf},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -3.0},
        {"top_k": 2**31},
        {"max_tokens": 0},
        {"min_tokens": 100},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"stop_token_ids": range(200)},
        {"eos_token_ids": range(200)},
    ],
)
def test_sampling_nonsense_is_refused_by_name(change: dict[str, object]) -> None:
    message = wire.sampling_to_wire(SamplingParams(max_tokens=16))
    (name,) = change
    message.ClearField(name)
    message.MergeFrom(pb.SamplingParams(**change))
    with pytest.raises(InvalidRequest) as caught:
        wire.sampling_from_wire(message)
    assert caught.value.param == name


def test_an_empty_message_is_no_sampling() -> None:
    with pytest.raises(InvalidRequest):
        wire.sampling_from_wire(pb.SamplingParams())


def test_unset_seed_and_logprobs_differ_from_zero_only_where_they_should() -> None:
    message = wire.sampling_to_wire(SamplingParams(seed=0, logprobs=0))
    received = wire.sampling_from_wire(message)
    assert (received.seed, received.logprobs, received.prompt_logprobs) == (0, 0, None)


def test_token_ids_that_no_vocabulary_has_are_not_sent() -> None:
    for params in (SamplingParams(logit_bias={-1: 1.0}), SamplingParams(stop_token_ids=(2**32,))):
        with pytest.raises(InvalidRequest):
            wire.sampling_to_wire(params)


LAYOUT = KvLayout(num_layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
FINGERPRINT = Fingerprint.of(LAYOUT, model_id="m", weights_digest="w", rope_digest="r")


def test_fingerprint_survives_and_every_field_counts() -> None:
    message = wire.fingerprint_to_wire(FINGERPRINT)
    assert wire.fingerprint_from_wire(message) == FINGERPRINT
    assert {field.name for field in fields(Fingerprint)} == set(pb.Fingerprint.DESCRIPTOR.fields_by_name)
    for field in fields(Fingerprint):
        value = getattr(FINGERPRINT, field.name)
        other = replace(FINGERPRINT, **{field.name: value + 1 if isinstance(value, int) else value + "x"})
        difference = FINGERPRINT.difference(wire.fingerprint_from_wire(wire.fingerprint_to_wire(other)))
        assert difference is not None and difference.startswith(field.name)


def test_an_incomplete_or_endless_fingerprint_is_refused() -> None:
    for field in fields(Fingerprint):
        message = wire.fingerprint_to_wire(FINGERPRINT)
        message.ClearField(field.name)
        with pytest.raises(AttemptFailed, match=field.name):
            wire.fingerprint_from_wire(message)
    message = wire.fingerprint_to_wire(FINGERPRINT)
    message.model_id = "x" * 10_000
    with pytest.raises(AttemptFailed, match="model_id"):
        wire.fingerprint_from_wire(message)


@given(
    st.lists(st.builds(TokenLogprob, TOKEN_IDS, st.floats(width=32, max_value=0.0), st.integers(1, 2**20)), max_size=21)
)
def test_logprobs_survive(entries: list[TokenLogprob]) -> None:
    message = wire.logprobs_to_wire(tuple(entries))
    assert wire.logprobs_from_wire(pb.TokenLogprobs.FromString(message.SerializeToString())) == tuple(entries)


@pytest.mark.parametrize("entry", [(math.nan, 1), (math.inf, 1), (-1.0, 0)])
def test_logprob_nonsense_is_refused(entry: tuple[float, int]) -> None:
    message = pb.TokenLogprobs(entries=[pb.TokenLogprob(token_id=1, logprob=entry[0], rank=entry[1])])
    with pytest.raises(AttemptFailed) as caught:
        wire.logprobs_from_wire(message)
    assert caught.value.reason == "bad_logprobs"


def test_more_logprobs_than_may_be_asked_for_are_refused() -> None:
    with pytest.raises(AttemptFailed):
        wire.logprobs_from_wire(pb.TokenLogprobs(entries=[pb.TokenLogprob(rank=1)] * 22))


def test_finish_reasons_survive() -> None:
    for reason in FinishReason:
        assert wire.finish_reason_from_wire(wire.finish_reason_to_wire(reason)) is reason
    assert wire.finish_reason_from_wire(pb.FINISH_REASON_UNSPECIFIED) is None
    for reason in (pb.FINISH_REASON_ERROR, pb.FINISH_REASON_CANCELLED, 99):
        with pytest.raises(AttemptFailed):
            wire.finish_reason_from_wire(reason)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("m", reason="prompt_too_long"), pb.ERROR_KIND_INVALID),
        (ModelNotFound("m"), pb.ERROR_KIND_INVALID),
        (Overloaded("m", reason="pool_too_small"), pb.ERROR_KIND_BUSY),
        (Unavailable("m"), pb.ERROR_KIND_BUSY),
        (Unavailable("m", reason="draining"), pb.ERROR_KIND_BUSY),
        (AttemptFailed("m", reason="digest_mismatch"), pb.ERROR_KIND_TRY_ELSEWHERE),
        (DeadlinePassed("m"), pb.ERROR_KIND_DEADLINE),
        (PdserveError("m"), pb.ERROR_KIND_INTERNAL),
    ],
)
def test_errors_keep_type_reason_and_message(error: PdserveError, kind: int) -> None:
    message = wire.error_to_wire(error)
    assert message.kind == kind
    received = wire.error_from_wire(message)
    assert (type(received), received.reason, str(received)) == (type(error), error.reason, "m")


def test_an_error_of_the_caller_keeps_the_field_it_names_unless_that_is_no_field() -> None:
    received = wire.error_from_wire(wire.error_to_wire(InvalidRequest("n is 64", param="n")))
    assert isinstance(received, InvalidRequest) and received.param == "n"
    for param in ("", "x y", "x" * 1000, "<b>"):
        received = wire.error_from_wire(pb.Error(kind=pb.ERROR_KIND_INVALID, reason="bad", message="m", param=param))
        assert isinstance(received, InvalidRequest) and received.param is None


def test_unexpected_errors_tell_nothing_but_their_type() -> None:
    message = wire.error_to_wire(KeyError("a secret prompt"))
    assert message.kind == pb.ERROR_KIND_INTERNAL
    assert "KeyError" in message.message and "secret" not in message.message
    assert wire.error_to_wire(ConfigError("m")).kind == pb.ERROR_KIND_INTERNAL


def test_an_error_of_unknown_kind_or_with_a_wild_reason_is_an_attempt_that_failed() -> None:
    for kind in (pb.ERROR_KIND_UNSPECIFIED, 77):
        error = wire.error_from_wire(pb.Error(kind=kind, reason="x" * 1000, message="m" * 100_000))
        assert type(error) is AttemptFailed
        assert error.reason == "unknown"
        assert len(str(error)) == wire.MAX_TEXT
