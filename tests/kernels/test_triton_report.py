"""Every Triton kernel compiles for every GPU we name, without one, and takes no more than the GPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_SPILLED_BYTES = 256
"""Of a thread. What is spilled in the prologue or epilogue costs nothing; a loop that spills shows in hundreds."""

KERNELS = {
    "write_kernel", "prefill_kernel", "decode_kernel", "reduce_kernel", "move_kernel", "rms_norm_kernel",
    "silu_mul_kernel", "rotary_kernel", "rough_kernel", "draw_kernel",
}  # fmt: skip

EVERYWHERE = ["x 64,", "x 96,", "bfloat16", "float32", "window cap sinks"]
"""What the cases of attention must have in them for every GPU."""

WHERE_LEAST_FITS = ["x 80,", "x 256,", "x 512,", " float16"]
"""And for the GPU with the least shared memory."""


@pytest.mark.timeout(600)
def test_every_kernel_compiles_within_the_limits_of_every_gpu(tmp_path: Path) -> None:
    # In a process of its own: kernels of this one may be interpreted. Its table is not captured here, so that `-s`
    # shows it.
    path = tmp_path / "rows"
    subprocess.run(
        [sys.executable, "-m", "kernels.triton_report", "--quick", "--json", str(path)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        timeout=580,
        check=True,
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for capability, shared_limit in ((80, 163 * 1024), (90, 227 * 1024), (100, 227 * 1024)):
        own = [row for row in rows if row["capability"] == capability]
        assert {row["kernel"] for row in own} == KERNELS
        for kernel in ("prefill_kernel", "decode_kernel"):
            cases = [row["case"] for row in own if row["kernel"] == kernel]
            for shape in EVERYWHERE + (WHERE_LEAST_FITS if capability == 80 else []):
                assert any(shape in case for case in cases), (kernel, shape)
        for row in own:
            assert row["spill_bytes"] <= MOST_SPILLED_BYTES, row
            assert row["shared_bytes"] <= shared_limit, row
            assert 0 < row["registers"] <= 255, row
            if row["kernel"] == "draw_kernel":
                assert not row["fused_float64"]
