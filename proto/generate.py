"""Regenerates the code beside the .proto files: `python -m proto.generate`; `--check` compares instead of writing.

Needs grpcio-tools (the `test` extra). Run it from anywhere; the same versions give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path, folder: Path = FOLDER) -> list[Path]:
    """Write the code for every .proto of `folder` under `out`/proto; the files written.

    Raises RuntimeError when the compiler refuses.
    """
    from grpc_tools import __file__ as tools_file
    from grpc_tools import protoc

    sources = sorted(folder.glob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={folder.parent}",
        f"--proto_path={Path(tools_file).parent / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *(str(source) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc refused the sources")
    return [out / folder.name / (source.stem + suffix) for source in sources for suffix in SUFFIXES]


def differences(folder: Path = FOLDER) -> list[str]:
    """Names of generated files of `folder` that are missing, superfluous or not what the sources give."""
    with tempfile.TemporaryDirectory() as fresh_folder:
        fresh = {path.name: path.read_bytes() for path in generate(Path(fresh_folder), folder)}
    present = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith(SUFFIXES)}
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proto.generate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when the generated code is not current"
    )
    if parser.parse_args().check:
        stale = differences()
        for name in stale:
            print(
                f"{FOLDER.name}/{name} is not what the .proto files give: run python -m proto.generate", file=sys.stderr
            )
        return 1 if stale else 0
    for path in generate(FOLDER.parent):
        print(path.relative_to(FOLDER.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
