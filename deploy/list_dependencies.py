"""Prints the dependencies of a pyproject.toml one a line, so that an image can install them before the code is there."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(project["project"]["dependencies"]))
