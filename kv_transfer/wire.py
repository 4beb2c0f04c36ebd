"""How our dataclasses and errors become protobuf messages and back. Torch-free; knows no connections.

Reading is strict: a message that a correct sender cannot have written raises InvalidRequest (sampling) or AttemptFailed
(everything else), so nothing further in checks it again.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import fields, replace

from engine.errors import (
    AttemptFailed,
    DeadlinePassed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PdserveError,
    Unavailable,
)
from engine.fingerprint import Fingerprint
from engine.sampling_params import MAX_LOGPROBS, MAX_STOP_TOKENS, SamplingParams
from engine.tokens import FinishReason, PositionLogprobs, TokenLogprob
from proto import worker_pb2 as pb

MAX_TEXT = 1000
"""Characters of a message or of a fingerprint's field that are believed to be sensible."""

DRAINING = "draining"
"""Reason of an Unavailable that a node raises while it drains."""

_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
_PARAM = re.compile(r"[a-z][a-z0-9_.\[\]]{0,63}")
_UINT32_MAX = 2**32 - 1


# Sampling parameters -------------------------------------------------------------------------------------------------


def float32_exact(params: SamplingParams) -> SamplingParams:
    """The same parameters as the wire's 32-bit floats carry them: sender and receiver then hold equal values."""
    return replace(
        params,
        temperature=_float32(params.temperature, 0.0),
        top_p=_float32(params.top_p, _SMALLEST_FLOAT32),
        min_p=_float32(params.min_p, 0.0),
        repetition_penalty=_float32(params.repetition_penalty, 0.01),
        presence_penalty=_float32(params.presence_penalty, -2.0),
        frequency_penalty=_float32(params.frequency_penalty, -2.0),
        logit_bias={token_id: _float32(bias, -100.0) for token_id, bias in params.logit_bias.items()},
    )


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """Every field is written. Raises InvalidRequest for token ids that no vocabulary can have."""
    for name in ("logit_bias", "stop_token_ids", "eos_token_ids"):
        for token_id in getattr(params, name):
            if not 0 <= token_id <= _UINT32_MAX:
                raise InvalidRequest(f"{name} has a token id outside any vocabulary", param=name)
    exact = float32_exact(params)
    return pb.SamplingParams(
        temperature=exact.temperature,
        top_p=exact.top_p,
        top_k=exact.top_k,
        min_p=exact.min_p,
        repetition_penalty=exact.repetition_penalty,
        presence_penalty=exact.presence_penalty,
        frequency_penalty=exact.frequency_penalty,
        seed=exact.seed,
        logit_bias=dict(exact.logit_bias),
        max_tokens=exact.max_tokens,
        min_tokens=exact.min_tokens,
        stop_token_ids=exact.stop_token_ids,
        eos_token_ids=exact.eos_token_ids,
        ignore_eos=exact.ignore_eos,
        logprobs=exact.logprobs,
        prompt_logprobs=exact.prompt_logprobs,
    )


def sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest naming the field. A field left out is 0, which top_p, max_tokens and others refuse."""
    if len(message.eos_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"eos_token_ids may have at most {MAX_STOP_TOKENS} entries", param="eos_token_ids")
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


_SMALLEST_FLOAT32 = 2.0**-149


def _float32(value: float, low: float) -> float:
    """The nearest 32-bit float; the next above it where rounding would leave the range that begins at `low`."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    if rounded < low:
        # Only 0 and positive values get here, whose bit patterns ascend with the value.
        (bits,) = struct.unpack("<I", struct.pack("<f", rounded))
        (rounded,) = struct.unpack("<f", struct.pack("<I", bits + 1))
    return float(rounded)


# Fingerprint ---------------------------------------------------------------------------------------------------------


def fingerprint_to_wire(fingerprint: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(**{field.name: getattr(fingerprint, field.name) for field in fields(fingerprint)})


def fingerprint_from_wire(message: pb.Fingerprint) -> Fingerprint:
    """Raises AttemptFailed naming the field when one is missing or too long; values are compared elsewhere."""
    values = {field.name: getattr(message, field.name) for field in fields(Fingerprint)}
    for name, value in values.items():
        if not value:
            raise AttemptFailed(f"the fingerprint has no {name}", reason="bad_fingerprint")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise AttemptFailed(f"{name} of the fingerprint is too long", reason="bad_fingerprint")
    return Fingerprint(**values)


# Tokens --------------------------------------------------------------------------------------------------------------


def logprobs_to_wire(logprobs: PositionLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        entries=[pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank) for entry in logprobs]
    )


def logprobs_from_wire(message: pb.TokenLogprobs) -> PositionLogprobs:
    """Raises AttemptFailed for NaN, +inf, rank 0 or more entries than may be asked for."""
    if len(message.entries) > MAX_LOGPROBS + 1:
        raise AttemptFailed(f"{len(message.entries)} log probabilities for one token", reason="bad_logprobs")
    entries = tuple(TokenLogprob(entry.token_id, entry.logprob, entry.rank) for entry in message.entries)
    for entry in entries:
        if math.isnan(entry.logprob) or entry.logprob == math.inf or entry.rank < 1:
            raise AttemptFailed(f"log probability {entry.logprob} of rank {entry.rank}", reason="bad_logprobs")
    return entries


def finish_reason_to_wire(reason: FinishReason) -> pb.FinishReason:
    return pb.FINISH_REASON_STOP if reason is FinishReason.STOP else pb.FINISH_REASON_LENGTH


def finish_reason_from_wire(reason: int) -> FinishReason | None:
    """None while the sequence goes on. CANCELLED and ERROR are for the caller to handle; here they are nonsense."""
    match reason:
        case pb.FINISH_REASON_UNSPECIFIED:
            return None
        case pb.FINISH_REASON_STOP:
            return FinishReason.STOP
        case pb.FINISH_REASON_LENGTH:
            return FinishReason.LENGTH
    raise AttemptFailed(f"finish reason {reason} where a sequence must have ended by itself", reason="bad_message")


# Errors --------------------------------------------------------------------------------------------------------------


def error_to_wire(error: BaseException) -> pb.Error:
    """Errors not raised on purpose become INTERNAL and tell their type only, since their text may hold a prompt."""
    if not isinstance(error, PdserveError):
        name = type(error).__name__
        return pb.Error(
            kind=pb.ERROR_KIND_INTERNAL, reason="internal", message=f"unexpected {name}; see the node's log"
        )
    param = error.param if isinstance(error, InvalidRequest) else None
    return pb.Error(kind=_kind_of(error), reason=error.reason, message=str(error)[:MAX_TEXT], param=param or "")


def error_from_wire(message: pb.Error) -> PdserveError:
    """Never raises. A kind that we do not know counts as this attempt's failure, so that another node is tried."""
    reason = message.reason if _REASON.fullmatch(message.reason) else "unknown"
    text = message.message[:MAX_TEXT] or reason
    match message.kind:
        case pb.ERROR_KIND_INVALID if reason == ModelNotFound.reason:
            return ModelNotFound(text, reason=reason)
        case pb.ERROR_KIND_INVALID:
            param = message.param if _PARAM.fullmatch(message.param) else None
            return InvalidRequest(text, param=param, reason=reason)
        case pb.ERROR_KIND_BUSY if reason in (Unavailable.reason, DRAINING):
            return Unavailable(text, reason=reason)
        case pb.ERROR_KIND_BUSY:
            return Overloaded(text, reason=reason)
        case pb.ERROR_KIND_DEADLINE:
            return DeadlinePassed(text, reason=reason)
        case pb.ERROR_KIND_INTERNAL:
            return PdserveError(text, reason=reason)
    return AttemptFailed(text, reason=reason)


def _kind_of(error: PdserveError) -> pb.ErrorKind:
    match error:
        case InvalidRequest() | ModelNotFound():
            return pb.ERROR_KIND_INVALID
        case Overloaded() | Unavailable():
            return pb.ERROR_KIND_BUSY
        case DeadlinePassed():
            return pb.ERROR_KIND_DEADLINE
        case AttemptFailed():
            return pb.ERROR_KIND_TRY_ELSEWHERE
    return pb.ERROR_KIND_INTERNAL
