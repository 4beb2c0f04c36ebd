"""Reads compose.yaml as Docker Compose does, as far as this project uses it: variables, merges, replicas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def env_example() -> dict[str, str]:
    """The variables of .env.example."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def variables_used() -> set[str]:
    """The variables that compose.yaml reads."""
    return {match[1] for match in _VARIABLE.finditer((ROOT / "compose.yaml").read_text(encoding="utf-8"))}


def load(variables: Mapping[str, str]) -> dict[str, Any]:
    """The services by name, with variables filled in. Raises ValueError where Compose would refuse."""

    def fill(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        value = variables.get(name, "")
        if value or kind is None:
            return value
        if kind == "?":
            raise ValueError(f"{name}: {rest}")
        return str(rest)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each) for each in value]
        return _VARIABLE.sub(fill, value) if isinstance(value, str) else value

    content = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    filled: dict[str, Any] = walk(content)
    return filled


def seconds(duration: str) -> float:
    """Of '45s' or '2m'."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]
