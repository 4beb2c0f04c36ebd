"""What an attempt must be like before a decode node takes it. Knows nothing of what the node is doing."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import AttemptFailed, InvalidRequest
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams
from kv_transfer.wire import sampling_from_wire
from proto import worker_pb2 as pb

_MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class Door:
    """Checks attempts against what a node can ever do.

    Attributes:
        identity: of this incarnation.
        layout: of a block.
        num_blocks: of the pool.
        vocab_size: token ids lie below it.
        max_model_len: longest prompt plus output.
        max_num_seqs: most sequences of one request.
        by_priority: whether requests may bring a priority.
    """

    identity: pb.NodeIdentity
    layout: KvLayout
    num_blocks: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    by_priority: bool

    def check(self, message: pb.StartAttempt) -> SamplingParams:
        """How to sample. Raises InvalidRequest naming the field, or AttemptFailed where another node might do it."""
        if message.decode_node != self.identity:
            raise AttemptFailed("the attempt is for another incarnation of this node", reason="epoch_mismatch")
        sampling = sampling_from_wire(message.sampling)
        sampling.check_token_ids(self.vocab_size)
        prompt = message.prompt_token_ids
        outputs = [start.output_token_ids for start in message.sequences]
        if not prompt or max((*prompt, *(token for output in outputs for token in output))) >= self.vocab_size:
            raise InvalidRequest("the prompt is empty or has a token id outside the vocabulary", param="prompt")
        self._check_sequences(message, sampling)
        if message.HasField("beam_search"):
            self._check_beams(message, sampling)
        if len(prompt) >= self.max_model_len:
            raise InvalidRequest("the prompt is longer than the context", param="prompt")
        if any(len(prompt) + len(output) >= self.max_model_len for output in outputs):
            raise AttemptFailed("the moved sequence is longer than this node's context", reason="context_too_short")
        longest = min(len(prompt) + sampling.max_tokens, self.max_model_len)
        if self.layout.blocks_for(longest) > self.num_blocks:
            raise InvalidRequest("prompt and max_tokens need more KV blocks than a decode node has", param="max_tokens")
        if message.priority and not self.by_priority:
            raise InvalidRequest("priority needs a server started with --scheduling-policy priority", param="priority")
        return sampling

    def _check_beams(self, message: pb.StartAttempt, sampling: SamplingParams) -> None:
        width = message.beam_search.width
        ranks = [start.index for start in message.sequences]
        # A search shows as many hypotheses as it has beams, unless `best_of` asked for more beams.
        param = "best_of" if width > max(ranks) + 1 else "n"
        if any(start.output_token_ids for start in message.sequences) or not max(ranks) < width <= self.max_num_seqs:
            raise InvalidRequest(
                f"a beam search has {width} beams for ranks up to {max(ranks)}; a decode node runs {self.max_num_seqs} "
                "sequences at once, and none may have output",
                param=param,
            )
        if width + len(sampling.eos_token_ids) + len(sampling.stop_token_ids) > self.vocab_size:
            raise InvalidRequest("there are more beams than tokens to go on with", param=param)
        if not abs(message.beam_search.length_penalty) <= _MAX_LENGTH_PENALTY:
            raise InvalidRequest(f"length_penalty must be within ±{_MAX_LENGTH_PENALTY:g}", param="length_penalty")
        shared = len(message.prompt_token_ids) // self.layout.block_size
        longest = min(len(message.prompt_token_ids) + sampling.max_tokens, self.max_model_len)
        # One block more for each beam, whose last full block may be computed again beside the one that is cached.
        if shared + width * (self.layout.blocks_for(longest) - shared + 1) > self.num_blocks:
            raise InvalidRequest("so many beams of that length need more KV blocks than a decode node has", param=param)

    def _check_sequences(self, message: pb.StartAttempt, sampling: SamplingParams) -> None:
        outputs = [start.output_token_ids for start in message.sequences]
        indices = [start.index for start in message.sequences]
        if not indices or len(set(indices)) < len(indices) or (len(indices) > 1 and any(outputs)):
            raise InvalidRequest("sequences must be distinct, and a moved one must come alone", param="sequences")
        if len(indices) > self.max_num_seqs:
            # Whether the client said `n` or `best_of` is not on the wire.
            raise InvalidRequest(
                f"n, or best_of, asks for {len(indices)} sequences, and a decode node runs {self.max_num_seqs} at once",
                param="n",
            )
        if any(len(output) >= sampling.max_tokens for output in outputs):
            raise InvalidRequest("a sequence has all of its tokens already", param="sequences")
