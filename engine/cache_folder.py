"""Where derived files live, and how several processes make each of them exactly once.

Everything under `cache_root()` can be deleted at any time while no process starts. A folder is written beside its final
place and renamed, so that a folder which exists is complete; what a crash left behind is swept by the next writer.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 22


def cache_root() -> Path:
    """`$PDSERVE_CACHE`, or `~/.cache/pdserve`."""
    chosen = os.environ.get("PDSERVE_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "pdserve"


def build_once(folder: Path, build: Callable[[Path], None], *, report: Callable[[str], None]) -> None:
    """Make `folder` by calling `build(temporary_folder)`, unless it is there. Blocks while another process does it."""
    if folder.is_dir():
        return
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock", report):
            if folder.is_dir():
                return
            for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
            try:
                build(partial)
                partial.chmod(0o755)
                _sync_folder(partial)
                partial.rename(folder)
                _sync(folder.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    logger.info("cache_built folder=%s", folder)


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn what a disk can do to us into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"No space is left on the disk while writing {place}.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigError(f"{error.filename or place} may not be written; set PDSERVE_CACHE elsewhere.") from error
        raise


def require_space(place: Path, num_bytes: int) -> None:
    """Raise ConfigError when the disk that will hold `place` has no room for `num_bytes` more."""
    existing = place
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ConfigError(
            f"{place} needs {num_bytes / 1e9:.2f} GB of disk and {free / 1e9:.2f} GB are free; "
            "make room or set PDSERVE_CACHE to another disk."
        )


def file_digest(path: Path) -> str:
    """xxh3-128 of the whole content; remembered under size and modification time, so that it is read once."""
    real = path.resolve()
    status = real.stat()
    stamp = cache_root() / "stamps" / f"{xxhash.xxh3_128_hexdigest(os.fsencode(real))}.json"
    wanted = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    known = _read_json(stamp)
    digest = known.pop("digest", None)
    if known == wanted and isinstance(digest, str):
        return digest
    state = xxhash.xxh3_128()
    with real.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            state.update(piece)
    digest = state.hexdigest()
    write_json(stamp, {**wanted, "digest": digest})
    return digest


def write_json(path: Path, content: dict[str, object]) -> None:
    """Replace `path` atomically."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # absent, or damaged: made anew
    return content if isinstance(content, dict) else {}


@contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that prepares the same model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
