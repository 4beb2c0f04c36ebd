"""Block hashes: fixed vectors, the same in every process, different whenever any input differs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from engine.block_hash import extend, hash_chain, root_hash
from engine.fingerprint import Fingerprint
from engine.kv_layout import KvLayout

LAYOUT = KvLayout(num_layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="float32")
FINGERPRINT = Fingerprint.of(LAYOUT, model_id="tiny/model", weights_digest="abc123", rope_digest="r0pe")

ROOT = "51570a824a195ebce0c59da36818b5d7"
SALTED_ROOT = "b83edb92b92cd355b7e57c23bf2827ae"
CHAIN = ["58e9347cdf9e5c6de2555a67b972daa3", "b5b584d7dd28ee0d89c093e3bc4e0ed2"]


def test_vectors() -> None:
    root = root_hash(FINGERPRINT)
    assert root.hex() == ROOT
    assert root_hash(FINGERPRINT, tenant_salt=b"0123456789abcdef", adapter_digest=b"\x01\x02").hex() == SALTED_ROOT
    assert [h.hex() for h in hash_chain(root, range(40), 16)] == CHAIN


def test_chain_is_repeated_extension_and_covers_full_blocks_only() -> None:
    root = root_hash(FINGERPRINT)
    tokens = [5, 0, 4_294_967_295, 7, 8, 9, 10]
    expected = []
    parent = root
    for start in (0, 3):
        parent = extend(parent, tokens[start : start + 3])
        expected.append(parent)
    assert hash_chain(root, tokens, 3) == expected
    assert hash_chain(root, tokens[:2], 3) == []
    assert all(len(h) == 16 for h in expected)


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "tiny/other"},
        {"weights_digest": "abc124"},
        {"kv_dtype": "bfloat16"},
        {"block_layout": "other"},
        {"block_size": 32},
        {"kv_heads": 1},
        {"rope_digest": "x"},
    ],
)
def test_root_covers_the_model(change: dict[str, object]) -> None:
    assert root_hash(replace(FINGERPRINT, **change)) != root_hash(FINGERPRINT)


def test_tenants_and_adapters_are_kept_apart() -> None:
    roots = [
        root_hash(FINGERPRINT),
        root_hash(FINGERPRINT, tenant_salt=b"a"),
        root_hash(FINGERPRINT, adapter_digest=b"a"),
        root_hash(FINGERPRINT, tenant_salt=b"a", adapter_digest=b"a"),
        root_hash(FINGERPRINT, tenant_salt=b"aa"),
    ]
    assert len(set(roots)) == len(roots)


def test_bytes_cannot_move_between_neighbouring_fields() -> None:
    one = replace(FINGERPRINT, model_id="ab", weights_digest="c")
    two = replace(FINGERPRINT, model_id="a", weights_digest="bc")
    assert root_hash(one) != root_hash(two)


def test_parent_and_order_matter() -> None:
    root = root_hash(FINGERPRINT)
    other = root_hash(FINGERPRINT, tenant_salt=b"x")
    assert extend(root, [1, 2]) != extend(root, [2, 1])
    assert extend(root, [1, 2]) != extend(other, [1, 2])
    assert extend(root, [1, 2]) != extend(root, [1, 2, 0])


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_equal_in_processes_with_different_hash_seeds_and_torch_free(seed: str) -> None:
    script = (
        "import sys\n"
        "from tests.engine.test_block_hash import FINGERPRINT\n"
        "from engine.block_hash import hash_chain, root_hash\n"
        "assert 'torch' not in sys.modules\n"
        "print(hash_chain(root_hash(FINGERPRINT), range(40), 16)[-1].hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == CHAIN[-1]
