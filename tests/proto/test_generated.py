"""Is the committed generated code what the .proto files give, and does the check notice when it is not?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from proto import generate


def test_generated_code_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proto.generate", "--check"],
        cwd=generate.FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_changed_source_a_changed_output_and_a_missing_file_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "proto"
    shutil.copytree(generate.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert generate.differences(folder) == []
    with (folder / "inference_pb2.pyi").open("a") as out:
        out.write("# edited\n")
    assert generate.differences(folder) == ["inference_pb2.pyi"]
    (folder / "inference_pb2_grpc.py").unlink()
    assert generate.differences(folder) == ["inference_pb2.pyi", "inference_pb2_grpc.py"]
    worker = folder / "worker.proto"
    worker.write_text(worker.read_text().replace("uint32 queue_length = 3;", "uint64 queue_length = 3;"))
    assert "worker_pb2.py" in generate.differences(folder)
