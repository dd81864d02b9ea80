"""Atomic file writes (temporary file, fsync, rename), and digests to verify their content."""

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
    """Yield a hidden temporary path next to ``path``; on exit it is flushed and renamed to ``path``.

    A file replaces an existing one; a folder can only replace an empty one. On failure the previous content
    is unchanged and the temporary path is removed. A killed process leaves its temporary path behind; the
    next process that writes to ``path`` removes it.
    """
    aside = _aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_dead(path)
        yield aside
        # Flush before renaming: after a power failure, a renamed file without flushed content is empty.
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
        sync(path.parent)  # the rename itself is stored in the parent folder
    except OSError as error:
        raise CofimaError(
            f"{path} was written, but it may not survive a power cut: {path.parent} could not be flushed "
            f"({error.strerror})"
        ) from error


def clear_aside(folder: Path) -> None:
    """Remove temporary files of killed processes from a folder that no other process is writing to."""
    for path in folder.glob(f".{HEX * 32}.*"):
        _remove(path)


def remove_aside(path: Path) -> None:
    """Remove a file or folder atomically, by renaming it first; of a link, only the link.

    If it cannot be renamed, it is left unchanged.
    """
    aside = _aside(path)
    with suppress(OSError):
        system.replace(path, aside)
    _remove(aside)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically; on failure the old one is unchanged."""
    with write_aside(path) as aside:
        aside.write_text(text, "utf-8")


def write_texts(texts: Mapping[str, str], folder: str | Path) -> list[Path]:
    """Write text files into a folder, given their content by name, each atomically; return their paths."""
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
    """Return the sha256 of a JSON-serializable value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; raise OSError for anything else, such as a pipe, which may block."""
    handle = system.open_to_read(path)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(handle, "rb")


def open_append(path: Path) -> TextIO:
    """Open a text file for appending; raise OSError if it is a symbolic link, which may point anywhere."""
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
    except RuntimeError as error:  # a user without a home folder
        raise CofimaError("there is no home folder for a cache: set COFIMA_CACHE to a folder") from error


def _aside(path: Path) -> Path:
    """Return a new hidden path that encodes machine and process, and keeps the file's extension."""
    return path.with_name(f".{_machine()}{os.getpid():08x}{uuid4().hex[:16]}.{path.name}")


def _clear_dead(path: Path) -> None:
    """Remove temporary paths that dead processes of this machine left next to a path."""
    for left in path.parent.glob(f".{_machine()}{HEX * 24}.{escape(path.name)}"):
        if not system.is_running(int(left.name[9:17], 16)):
            _remove(left)


def _machine() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _set_mode(path: Path) -> None:
    """Set the mode of a file according to the umask; libraries that write tensors choose their own."""
    mask = os.umask(0o077)  # it can only be read by setting it: use a strict value for that moment
    os.umask(mask)
    there = path.stat()
    if stat.S_ISREG(there.st_mode) and there.st_nlink == 1 and stat.S_IMODE(there.st_mode) != 0o666 & ~mask:
        path.chmod(0o666 & ~mask)


def _remove(path: Path) -> None:
    with suppress(OSError):  # an error while cleaning up must not mask the original one
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
