"""Prints the dependencies of a pyproject.toml one a line, for an image that installs them before it has the code."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(project["project"]["dependencies"]))
