"""Models with random weights: a file that pdserve converts and whose tokens are all text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.costs import ModelShape
from bench.random_model import END_OF_TEXT, SHAPES, Shape, vocabulary, write_model
from bench.vocabulary import Vocabulary
from engine.gguf_convert import convert

SHAPE = Shape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=4000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    write_model(SHAPE, folder.parent / "random.gguf")
    convert(folder.parent / "random.gguf", folder)
    return folder


def test_the_model_has_its_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["tie_word_embeddings"]
    shape = ModelShape.read(folder)
    assert (shape.num_layers, shape.hidden, shape.intermediate) == (2, 64, 96)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab) == (4, 2, 16, 4000)


def test_any_number_of_tokens_can_be_asked_for_as_text(folder: Path) -> None:
    words = Vocabulary.of_tokenizer(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(0)
    for count in (8, 64, 500):
        text, tokens = words.text_of(words.draw(count, draw), draw)
        assert abs(tokens - count) <= 1
        assert len(text) >= count


def test_every_token_but_one_is_text_of_its_own() -> None:
    tokens, merges = vocabulary(SHAPES["qwen2.5-0.5b"].vocabulary)
    assert len(set(tokens)) == len(tokens) == 151936
    assert tokens.count(END_OF_TEXT) == 1
    assert {"".join(merge.split()) for merge in merges} == set(tokens[257:])


def test_known_shapes_have_the_parameters_of_their_models() -> None:
    counts = {name: sum(int(np.prod(size)) for _, size in shape.tensors()) for name, shape in SHAPES.items()}
    assert counts == {"qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304}
