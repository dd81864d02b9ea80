"""Atomic file writing (aside, fsync, rename), and digests to verify what was written."""

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from safetensors import SafetensorError

from cofima.core import system
from cofima.core.errors import CofimaError
from cofima.core.system import sync

HEX = "[0-9a-f]"


@contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Yield a hidden temporary path beside ``path``; on exit it is flushed and renamed to ``path``.

    A file replaces an existing one; a folder may replace only an empty one. On any failure the previous
    content stays as it was, and the temporary path is removed; that of a killed process is by the next one
    that writes to ``path``.
    """
    aside = _aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_dead(path)
        yield aside
        # Content first: after a power cut, a renamed file whose content was not flushed is empty.
        for written in [*aside.rglob("*"), aside]:
            _set_mode(written)
            sync(written)
        system.replace(aside, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CofimaError(f"{path} could not be written ({reason}); nothing was changed") from error
    finally:
        _remove(aside)
    try:
        sync(path.parent)  # the rename itself is content of the parent
    except OSError as error:
        raise CofimaError(
            f"{path} was written, but it may not survive a power cut: {path.parent} could not be flushed "
            f"({error.strerror})"
        ) from error


def clear_aside(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder that nobody else is writing to."""
    for path in folder.glob(f".{HEX * 32}.*"):
        _remove(path)


def remove_aside(path: Path) -> None:
    """Remove a file or a folder, which is gone at once and not piece by piece; of a link, the link only.

    What cannot be removed stays as it is.
    """
    aside = _aside(path)
    with suppress(OSError):
        system.replace(path, aside)
    _remove(aside)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically; on failure the old one stays as it is."""
    with write_aside(path) as aside:
        aside.write_text(text, "utf-8")


def write_texts(texts: Mapping[str, str], folder: str | Path) -> list[Path]:
    """Write files by their names into a folder, each atomically."""
    for name, text in texts.items():
        write_text(Path(folder) / name, text)
    return [Path(folder) / name for name in texts]


def require_space(path: Path, size: int) -> None:
    """Raise if the disk has less than ``size`` bytes free at ``path``."""
    there = next(parent for parent in path.resolve().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise CofimaError(f"{path} needs {size / 1e6:,.0f} MB, and {there} has {free / 1e6:,.0f} MB left")


def json_digest(value: Any) -> str:
    """Return the sha256 of a JSON-able value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading; raise OSError for what is none, such as a pipe, which may never answer."""
    handle = system.open_to_read(path)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(handle, "rb")


def open_append(path: Path) -> TextIO:
    """Open a text file to append to it; raise OSError if it is a link, which may lead anywhere."""
    handle = system.open_unlinked(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.fdopen(handle, "a", encoding="utf-8")


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


def _aside(path: Path) -> Path:
    """Return a new hidden path; it tells the machine and the process, and ends as writers expect it."""
    return path.with_name(f".{_machine()}{os.getpid():08x}{uuid4().hex[:16]}.{path.name}")


def _clear_dead(path: Path) -> None:
    """Remove what processes of this machine that are no longer alive left aside of a path."""
    for left in path.parent.glob(f".{_machine()}{HEX * 24}.{escape(path.name)}"):
        if not system.is_running(int(left.name[9:17], 16)):
            _remove(left)


def _machine() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _set_mode(path: Path) -> None:
    """Give a file the mode that the user's umask says; libraries that write tensors choose their own."""
    mask = os.umask(0o077)  # can only be read by setting it: for a moment rather too strict than too lax
    os.umask(mask)
    there = path.stat()
    if stat.S_ISREG(there.st_mode) and there.st_nlink == 1 and stat.S_IMODE(there.st_mode) != 0o666 & ~mask:
        path.chmod(0o666 & ~mask)


def _remove(path: Path) -> None:
    with suppress(OSError):  # what cannot be removed must not hide why
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
