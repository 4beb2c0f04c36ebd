"""Copies of GGUF files in another type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from bench.gguf_copy import copy_with_dtype
from engine.errors import ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    matrix = gguf.quants.quantize(values, GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_q.weight", matrix, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "source.gguf"


@pytest.mark.parametrize(
    ("dtype", "kind", "error"),
    [("float32", GGMLQuantizationType.F32, 0.0), ("bfloat16", GGMLQuantizationType.BF16, 2**-8)],
)
def test_weights_and_facts_are_kept(
    source: Path, tmp_path: Path, dtype: str, kind: GGMLQuantizationType, error: float
) -> None:
    copy_with_dtype(source, tmp_path / "copy.gguf", dtype)
    before, after = GGUFReader(source), GGUFReader(tmp_path / "copy.gguf")
    assert after.fields["general.architecture"].contents() == "llama"
    assert after.fields["llama.block_count"].contents() == 2
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    matrix, norm = after.tensors
    assert (matrix.name, matrix.tensor_type, list(matrix.shape)) == ("blk.0.attn_q.weight", kind, [64, 4])
    assert norm.tensor_type is GGMLQuantizationType.F32
    expected = gguf.quants.dequantize(before.tensors[0].data, GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(gguf.quants.dequantize(matrix.data, kind), expected, rtol=error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.gguf", "source.gguf"]


def test_what_cannot_be_copied_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not int8"):
        copy_with_dtype(source, tmp_path / "copy.gguf", "int8")
    (tmp_path / "no.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match=r"no\.gguf is no GGUF file"):
        copy_with_dtype(tmp_path / "no.gguf", tmp_path / "copy.gguf", "float32")
