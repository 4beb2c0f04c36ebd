"""Generates the Python code of proto/*.proto beside them; with --check says whether it is what the sources give."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path) -> None:
    """Write the code of every source below `target`. Raises RuntimeError when a source is wrong."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *outputs, *sources]) != 0:
        raise RuntimeError("protoc failed")


def outdated() -> list[str]:
    """Names of generated files that differ from what the sources give, or are missing, or have no source."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "proto").iterdir()}
    present = {path.name: path.read_bytes() for path in (ROOT / "proto").glob("*_pb2*.py*")}
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    names = outdated()
    if names:
        print(f"proto: not generated from their sources: {', '.join(names)}; run `make proto`", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
