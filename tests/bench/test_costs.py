"""Bytes and FLOPs, against cases counted by hand and against torch's own counter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from bench import costs
from bench.costs import Cost, ModelShape
from engine.errors import ConfigError
from tests.tiny_model import build_tiny_model

SHAPE = ModelShape(
    num_layers=3, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=64, vocab=100, layer_weights=1000
)


def test_a_product_reads_weights_and_states_and_writes_results() -> None:
    assert costs.linear(3, 4, 5, "float32") == Cost((4 * 5 + 3 * 4 + 3 * 5) * 4, 2 * 3 * 4 * 5)


def test_attention_of_one_token_reads_its_context_once_per_kv_head() -> None:
    # 5 keys and 5 values of 2 heads, a query and a result of 4 heads, 8 elements of 2 bytes each.
    assert costs.attention(SHAPE, [(1, 5)], "bfloat16") == Cost((5 * 2 * 2 + 2 * 4) * 8 * 2, 2 * 2 * 5 * 4 * 8)


@pytest.mark.parametrize(("new", "context"), [(1, 1), (3, 3), (3, 5), (16, 40)])
def test_a_query_of_a_chunk_sees_what_comes_before_it(new: int, context: int) -> None:
    pairs = sum(context - back for back in range(new))
    assert costs.attention(SHAPE, [(new, context)], "float32").flops == 4 * pairs * 4 * 8


def test_sequences_add_up() -> None:
    one, other = (costs.attention(SHAPE, [part], "float32") for part in ((1, 7), (4, 9)))
    assert costs.attention(SHAPE, [(1, 7), (4, 9)], "float32") == one + other


def test_small_operations() -> None:
    assert costs.write_kv(SHAPE, 5, "float32") == Cost(5 * 2 * 2 * 8 * 4 * 2, 0)
    assert costs.elementwise(10, reads=2, flops=5, dtype="bfloat16") == Cost(10 * 3 * 2, 50)
    assert Cost(8, 4).intensity == 0.5


def test_a_pass_reads_every_weight_once_however_many_tokens() -> None:
    short, long = (costs.forward_pass(SHAPE, [(new, 64)], 1, "float32") for new in (1, 64))
    cached = 3 * 64 * 2 * 2 * 8 * 4
    weights = (1000 + 100 * 32) * 4
    assert short.num_bytes == weights + cached + 3 * 2 * 4 * 8 * 4
    assert long.num_bytes - short.num_bytes == 3 * 63 * 2 * 4 * 8 * 4  # queries and results only


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_of_a_model_are_those_that_torch_multiplies(tmp_path: Path, tied: bool) -> None:
    folder = build_tiny_model(tmp_path, tie_word_embeddings=tied)
    shape = ModelShape.read(folder)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.num_layers) == (9, 3, 8, 2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 6, dtype=torch.int64))
    multiplied = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    with_attention = costs.forward_pass(shape, [(6, 6)], 6, "float32").flops
    assert with_attention - 2 * costs.attention(shape, [(6, 6)], "float32").flops == multiplied
    assert shape.read_weights == sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and (tied or "embed" not in name)
    )


def test_a_model_that_does_not_tell_its_shape_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    config = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config.replace("intermediate_size", "inner"), encoding="utf-8")
    with pytest.raises(ConfigError, match="intermediate_size"):
        ModelShape.read(folder)
