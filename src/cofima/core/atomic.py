"""Atomic file writing (aside, fsync, rename), and digests to verify what was written."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError

from cofima.core.errors import CofimaError


@contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Yield a hidden temporary path beside ``path``; on exit it is flushed and renamed to ``path``.

    A file replaces an existing one; a folder may replace only an empty one. On any failure the previous
    content stays as it was, and the temporary path is removed.
    """
    # A random name: process numbers may collide between machines that share a disk. The suffix stays last,
    # since writers choose a format by it.
    aside = path.with_name(f".{uuid4().hex}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        # Content first: after a power cut, a renamed file whose content was not flushed is empty.
        for written in [*aside.rglob("*"), aside]:
            sync(written)
        aside.replace(path)
        sync(path.parent)  # the rename itself is content of the parent
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CofimaError(f"{path} could not be written ({reason}); nothing was changed") from error
    finally:
        _remove(aside)


def clear_aside(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder that nobody else is writing to."""
    for path in folder.glob(f".{'[0-9a-f]' * 32}.*"):
        _remove(path)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically; on failure the old one stays as it is."""
    with write_aside(path) as aside:
        aside.write_text(text, "utf-8")


def write_texts(texts: Mapping[str, str], folder: str | Path) -> list[Path]:
    """Write files by their names into a folder, each atomically."""
    for name, text in texts.items():
        write_text(Path(folder) / name, text)
    return [Path(folder) / name for name in texts]


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(path: Path, size: int) -> None:
    """Raise if the disk has less than ``size`` bytes free at ``path``."""
    there = next(parent for parent in path.resolve().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise CofimaError(f"{path} needs {size / 1e6:,.0f} MB, and {there} has {free / 1e6:,.0f} MB left")


def json_digest(value: Any) -> str:
    """Return the sha256 of a JSON-able value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Return the cache folder: $COFIMA_CACHE, or ~/.cache/cofima."""
    try:
        return Path(os.environ.get("COFIMA_CACHE") or "~/.cache/cofima").expanduser()
    except RuntimeError as error:  # a user without a home
        raise CofimaError("there is no home folder for a cache: set COFIMA_CACHE to a folder") from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # as rmtree above: what cannot be removed must not hide why
            path.unlink()
