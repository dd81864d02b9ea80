"""Folder locks: one thread of one process at a time writes to a model folder; any number may read it.

The lock is one of the operating system, taken by ``filelock`` on a file in the folder that is opened here,
never through a link. It is released when its process ends, even if that is killed. The file remains when the
lock is released, since others may have opened it to wait; it is removed only with a folder that stayed
empty. It is never written to; a second file next to it names the holder.
"""

import errno
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cofima.core.atomic import open_file
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.core.system import has_name, open_unlinked, unlink_and_close

NAME = ".lock"
HOLDER = ".lock.holder"
PAUSE = 0.2  # seconds between two attempts


@dataclass
class _Held:
    """Folder locked by this process: thread, depth of nesting, and folders created for it."""

    handle: int | None
    made: list[Path]
    thread: int
    times: int = 0


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


def lock_file(handle: int, waiting: Callable[[], None]) -> None:
    """Lock an open file until it is closed; call ``waiting`` once if another process holds the lock."""
    if try_lock_file(handle):
        return
    waiting()
    while not try_lock_file(handle):
        time.sleep(PAUSE)


def try_lock_file(handle: int) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    from filelock import lock_descriptor  # imported here: commands that only read must not wait for it

    return lock_descriptor(handle, blocking=False)


@contextmanager
def folder_lock(folder: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock a folder for writing; raise if another holder does not release it within ``timeout`` seconds.

    The folder is created if it does not exist, and removed again if it stays empty. The lock is reentrant
    within a thread.
    """
    where, until = folder.resolve(), time.monotonic() + timeout
    while holder := _enter(folder, where):
        if time.monotonic() >= until:
            raise CofimaError(
                f"{folder} is being written by {holder}: wait for it, or end it; nothing was changed"
            )
        time.sleep(PAUSE)
    try:
        yield
    finally:
        with _guard:
            _held[where].times -= 1
            if not _held[where].times:
                _release(where, _held.pop(where))


def _enter(folder: Path, where: Path) -> str:
    """Acquire or re-enter the lock; return a description of another holder, or an empty string."""
    with _guard:
        if where not in _held:
            made = [path for path in (where, *where.parents) if not path.exists()]
            handle = _acquire(folder)
            if isinstance(handle, str):
                return handle
            _held[where] = _Held(handle, made, threading.get_ident())
        if _held[where].thread != threading.get_ident():
            return "another thread of this process"
        _held[where].times += 1
        return ""


def _release(where: Path, hold: _Held) -> None:
    with suppress(OSError):
        (where / HOLDER).unlink()
    empty = False
    with suppress(OSError):
        empty = [path.name for path in where.iterdir()] == [NAME]
    with suppress(OSError):
        if hold.handle is not None and empty:
            unlink_and_close(where / NAME, hold.handle)
        elif hold.handle is not None:
            os.close(hold.handle)
        elif empty:
            (where / NAME).unlink()
    with suppress(OSError):  # not empty
        for path in hold.made:
            path.rmdir()


def _acquire(folder: Path) -> int | str | None:
    """Return the open, locked file; a description of its holder; or None if the file system has no locks."""
    path = folder / NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = _open(path)
        except OSError as error:
            reason = f"{path} is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise CofimaError(f"{folder} cannot be written: {reason}") from error
        try:
            if not try_lock_file(handle):
                os.close(handle)
                return _read_holder(folder)
            if has_name(path, handle):
                _write_holder(folder)
                return handle
            os.close(handle)  # unlinked by its last holder between open and lock: a stale file, try again
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise CofimaError(f"{folder} cannot be locked: {error.strerror}") from error
            warnings.warn(
                f"{folder}: this file system has no locks ({error.strerror}); let one process at a time "
                "write there",
                CofimaWarning,
                stacklevel=5,
            )
            return None


def _open(path: Path) -> int:
    """Open or create the lock file; not through a link, which may point to any file."""
    try:
        return open_unlinked(path, os.O_RDWR | os.O_CREAT)
    except PermissionError:  # owned by another user, in a shared folder
        return open_unlinked(path, os.O_RDONLY)


def _write_holder(folder: Path) -> None:
    """Record this process, for the error messages of others."""
    now = datetime.now().isoformat(" ", "minutes")
    with suppress(OSError):  # a full disk: the lock works without this file
        (folder / HOLDER).unlink(missing_ok=True)
        with (folder / HOLDER).open("x") as file:  # a new file: never through a link
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n")


def _read_holder(folder: Path) -> str:
    with suppress(OSError), open_file(folder / HOLDER) as file:
        return file.read(200).decode(errors="replace").strip() or "another process"
    return "another process"
