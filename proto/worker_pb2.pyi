from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_STARTING: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_STALLED: _ClassVar[NodeState]

class TransportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_KIND_UNSPECIFIED: _ClassVar[TransportKind]
    TRANSPORT_KIND_GRPC: _ClassVar[TransportKind]
    TRANSPORT_KIND_SHARED_MEMORY: _ClassVar[TransportKind]
    TRANSPORT_KIND_TORCH_DISTRIBUTED: _ClassVar[TransportKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_INVALID: _ClassVar[ErrorKind]
    ERROR_KIND_BUSY: _ClassVar[ErrorKind]
    ERROR_KIND_TRY_ELSEWHERE: _ClassVar[ErrorKind]
    ERROR_KIND_DEADLINE: _ClassVar[ErrorKind]
    ERROR_KIND_INTERNAL: _ClassVar[ErrorKind]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_STARTING: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_STALLED: NodeState
TRANSPORT_KIND_UNSPECIFIED: TransportKind
TRANSPORT_KIND_GRPC: TransportKind
TRANSPORT_KIND_SHARED_MEMORY: TransportKind
TRANSPORT_KIND_TORCH_DISTRIBUTED: TransportKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_INVALID: ErrorKind
ERROR_KIND_BUSY: ErrorKind
ERROR_KIND_TRY_ELSEWHERE: ErrorKind
ERROR_KIND_DEADLINE: ErrorKind
ERROR_KIND_INTERNAL: ErrorKind

class NodeIdentity(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("protocol_version", "model_id", "weights_digest", "kv_dtype", "num_layers", "kv_heads", "head_dim", "block_size", "block_layout", "rope_digest", "tensor_parallel_size")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ROPE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_id: str
    weights_digest: str
    kv_dtype: str
    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    block_layout: str
    rope_digest: str
    tensor_parallel_size: int
    def __init__(self, protocol_version: _Optional[int] = ..., model_id: _Optional[str] = ..., weights_digest: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., block_layout: _Optional[str] = ..., rope_digest: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("identity", "role", "address", "fingerprint", "vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "transports", "pid", "version")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    identity: NodeIdentity
    role: Role
    address: str
    fingerprint: Fingerprint
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    transports: _containers.RepeatedScalarFieldContainer[TransportKind]
    pid: int
    version: str
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportKind, str]]] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "in_use", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    in_use: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., in_use: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class TransferCounts(_message.Message):
    __slots__ = ("started", "committed", "failed", "aborted")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    started: int
    committed: int
    failed: int
    aborted: int
    def __init__(self, started: _Optional[int] = ..., committed: _Optional[int] = ..., failed: _Optional[int] = ..., aborted: _Optional[int] = ...) -> None: ...

class TransportUse(_message.Message):
    __slots__ = ("transfers", "bytes", "seconds")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    transfers: int
    bytes: int
    seconds: float
    def __init__(self, transfers: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("identity", "state", "blocks", "transfers", "leases", "in_flight", "running_sequences", "waiting_sequences", "waiting_tokens", "last_step_age_s", "steps", "prefill_tokens_computed", "prefill_tokens_cached", "tokens_generated", "preemptions", "local_prefills", "messages_ignored", "kv_bytes", "prefill_tokens_per_s", "failures", "unused_slots", "reserved_blocks", "swaps", "swap_bytes", "expected_output_tokens", "transports", "allocated_slots")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TransportUse
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TransportUse, _Mapping]] = ...) -> None: ...
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_IGNORED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    identity: NodeIdentity
    state: NodeState
    blocks: BlockCounts
    transfers: TransferCounts
    leases: int
    in_flight: int
    running_sequences: int
    waiting_sequences: int
    waiting_tokens: int
    last_step_age_s: float
    steps: int
    prefill_tokens_computed: int
    prefill_tokens_cached: int
    tokens_generated: int
    preemptions: int
    local_prefills: int
    messages_ignored: int
    kv_bytes: int
    prefill_tokens_per_s: float
    failures: _containers.ScalarMap[str, int]
    unused_slots: int
    reserved_blocks: int
    swaps: int
    swap_bytes: int
    expected_output_tokens: float
    transports: _containers.MessageMap[str, TransportUse]
    allocated_slots: int
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., transfers: _Optional[_Union[TransferCounts, _Mapping]] = ..., leases: _Optional[int] = ..., in_flight: _Optional[int] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., last_step_age_s: _Optional[float] = ..., steps: _Optional[int] = ..., prefill_tokens_computed: _Optional[int] = ..., prefill_tokens_cached: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., preemptions: _Optional[int] = ..., local_prefills: _Optional[int] = ..., messages_ignored: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., failures: _Optional[_Mapping[str, int]] = ..., unused_slots: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., swaps: _Optional[int] = ..., swap_bytes: _Optional[int] = ..., expected_output_tokens: _Optional[float] = ..., transports: _Optional[_Mapping[str, TransportUse]] = ..., allocated_slots: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("finished", "cut_short")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CUT_SHORT_FIELD_NUMBER: _ClassVar[int]
    finished: int
    cut_short: int
    def __init__(self, finished: _Optional[int] = ..., cut_short: _Optional[int] = ...) -> None: ...

class AdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class AdapterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "max_tokens", "min_tokens", "stop_token_ids", "eos_token_ids", "ignore_eos", "logprobs", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, entries: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("index", "output_token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("kind", "reason", "message", "param")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorKind
    reason: str
    message: str
    param: str
    def __init__(self, kind: _Optional[_Union[ErrorKind, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class PhaseTimes(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "transfer_s", "first_decode_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    transfer_s: float
    first_decode_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., first_decode_s: _Optional[float] = ...) -> None: ...

class PrefillTarget(_message.Message):
    __slots__ = ("identity", "address")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    identity: NodeIdentity
    address: str
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ...) -> None: ...

class StartAttempt(_message.Message):
    __slots__ = ("attempt_id", "request_id", "decode_node", "deadline_ms", "prompt_token_ids", "sampling", "sequences", "prefill_nodes", "tenant_salt", "local_prefill_threshold", "priority", "beam_search")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODES_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    request_id: str
    decode_node: NodeIdentity
    deadline_ms: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    prefill_nodes: _containers.RepeatedCompositeFieldContainer[PrefillTarget]
    tenant_salt: bytes
    local_prefill_threshold: int
    priority: int
    beam_search: BeamSearch
    def __init__(self, attempt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., decode_node: _Optional[_Union[NodeIdentity, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., prefill_nodes: _Optional[_Iterable[_Union[PrefillTarget, _Mapping]]] = ..., tenant_salt: _Optional[bytes] = ..., local_prefill_threshold: _Optional[int] = ..., priority: _Optional[int] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ...) -> None: ...

class CancelAttempt(_message.Message):
    __slots__ = ("attempt_id", "sequence_index")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    sequence_index: int
    def __init__(self, attempt_id: _Optional[str] = ..., sequence_index: _Optional[int] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("router_id", "decode_node")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    decode_node: NodeIdentity
    def __init__(self, router_id: _Optional[str] = ..., decode_node: _Optional[_Union[NodeIdentity, _Mapping]] = ...) -> None: ...

class SessionCommand(_message.Message):
    __slots__ = ("hello", "start", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    start: StartAttempt
    cancel: CancelAttempt
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., start: _Optional[_Union[StartAttempt, _Mapping]] = ..., cancel: _Optional[_Union[CancelAttempt, _Mapping]] = ...) -> None: ...

class SequenceUpdate(_message.Message):
    __slots__ = ("attempt_id", "sequence_index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "error")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    sequence_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    stop_token_id: int
    error: Error
    def __init__(self, attempt_id: _Optional[str] = ..., sequence_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class AttemptUpdate(_message.Message):
    __slots__ = ("attempt_id", "cached_tokens", "prompt_logprobs", "times", "prefill_node_id")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    cached_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    times: PhaseTimes
    prefill_node_id: str
    def __init__(self, attempt_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., times: _Optional[_Union[PhaseTimes, _Mapping]] = ..., prefill_node_id: _Optional[str] = ...) -> None: ...

class SessionUpdate(_message.Message):
    __slots__ = ("identity", "attempts", "sequences")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    identity: NodeIdentity
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptUpdate]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceUpdate]
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[AttemptUpdate, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[SequenceUpdate, _Mapping]]] = ...) -> None: ...

class SharedMemoryOffer(_message.Message):
    __slots__ = ("boot_id", "pid", "pid_start_ticks", "fd", "size_bytes", "nonce")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_START_TICKS_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid: int
    pid_start_ticks: int
    fd: int
    size_bytes: int
    nonce: bytes
    def __init__(self, boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., pid_start_ticks: _Optional[int] = ..., fd: _Optional[int] = ..., size_bytes: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class OpenHandoff(_message.Message):
    __slots__ = ("attempt_id", "request_id", "decode_node", "prefill_node", "deadline_ms", "fingerprint", "token_ids", "prompt_length", "sampling", "sequence_indices", "tenant_salt", "blocks_held", "transports", "shared_memory", "priority")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDICES_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    request_id: str
    decode_node: NodeIdentity
    prefill_node: NodeIdentity
    deadline_ms: int
    fingerprint: Fingerprint
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: SamplingParams
    sequence_indices: _containers.RepeatedScalarFieldContainer[int]
    tenant_salt: bytes
    blocks_held: int
    transports: _containers.RepeatedScalarFieldContainer[TransportKind]
    shared_memory: SharedMemoryOffer
    priority: int
    def __init__(self, attempt_id: _Optional[str] = ..., request_id: _Optional[str] = ..., decode_node: _Optional[_Union[NodeIdentity, _Mapping]] = ..., prefill_node: _Optional[_Union[NodeIdentity, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., sequence_indices: _Optional[_Iterable[int]] = ..., tenant_salt: _Optional[bytes] = ..., blocks_held: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportKind, str]]] = ..., shared_memory: _Optional[_Union[SharedMemoryOffer, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortHandoff(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandoffCommand(_message.Message):
    __slots__ = ("open", "grant", "abort", "committed", "renew")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    open: OpenHandoff
    grant: Grant
    abort: AbortHandoff
    committed: Committed
    renew: RenewLease
    def __init__(self, open: _Optional[_Union[OpenHandoff, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., abort: _Optional[_Union[AbortHandoff, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., renew: _Optional[_Union[RenewLease, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("identity", "transport", "queue_length", "pid", "pid_start_ticks")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_START_TICKS_FIELD_NUMBER: _ClassVar[int]
    identity: NodeIdentity
    transport: TransportKind
    queue_length: int
    pid: int
    pid_start_ticks: int
    def __init__(self, identity: _Optional[_Union[NodeIdentity, _Mapping]] = ..., transport: _Optional[_Union[TransportKind, str]] = ..., queue_length: _Optional[int] = ..., pid: _Optional[int] = ..., pid_start_ticks: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("blocks_to_send", "cached_tokens")
    BLOCKS_TO_SEND_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    blocks_to_send: int
    cached_tokens: int
    def __init__(self, blocks_to_send: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("sequence_index", "token_id", "logprobs")
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_index: int
    token_id: int
    logprobs: TokenLogprobs
    def __init__(self, sequence_index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "queue_s", "prefill_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    queue_s: float
    prefill_s: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class BlockPiece(_message.Message):
    __slots__ = ("block_index", "offset_bytes", "payload", "digest")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    offset_bytes: int
    payload: bytes
    digest: bytes
    def __init__(self, block_index: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., payload: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("num_tokens", "blocks_sent", "num_layers", "digest")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SENT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    blocks_sent: int
    num_layers: int
    digest: bytes
    def __init__(self, num_tokens: _Optional[int] = ..., blocks_sent: _Optional[int] = ..., num_layers: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("tokens_computed",)
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    tokens_computed: int
    def __init__(self, tokens_computed: _Optional[int] = ...) -> None: ...

class HandoffEvent(_message.Message):
    __slots__ = ("accepted", "started", "first_tokens", "block", "complete", "failed", "progress", "prompt_logprobs")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    started: Started
    first_tokens: FirstTokens
    block: BlockPiece
    complete: Complete
    failed: Error
    progress: Progress
    prompt_logprobs: PromptLogprobs
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., block: _Optional[_Union[BlockPiece, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., failed: _Optional[_Union[Error, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("attempt_id", "prefill_node")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    prefill_node: NodeIdentity
    def __init__(self, attempt_id: _Optional[str] = ..., prefill_node: _Optional[_Union[NodeIdentity, _Mapping]] = ...) -> None: ...

class FenceReply(_message.Message):
    __slots__ = ("stopped",)
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    def __init__(self, stopped: _Optional[bool] = ...) -> None: ...
