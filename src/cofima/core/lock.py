"""Folder locks: one process at a time writes into a model folder; any number may read it.

The lock is the system's own (flock) on a file in the folder. It ends with the process that holds it, even
if that is killed.
"""

import errno
import fcntl
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cofima.core.errors import CofimaError, CofimaWarning

NAME = ".lock"


@dataclass
class _Held:
    """A folder locked by this process, the depth of nesting, and the folders that were created for it."""

    handle: int | None
    made: list[Path]
    times: int = 0


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


@contextmanager
def folder_lock(folder: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock a folder against other processes; raise if another one holds it after ``timeout`` seconds.

    The folder is created if it is not there, and removed again if it stays empty. The lock is reentrant
    within a process, also for its other threads.
    """
    where = folder.resolve()
    with _guard:
        if where not in _held:
            made = [path for path in (where, *where.parents) if not path.exists()]
            _held[where] = _Held(_acquire(folder, timeout), made)
        _held[where].times += 1
    try:
        yield
    finally:
        with _guard:
            _held[where].times -= 1
            if not _held[where].times:
                _release(where, _held.pop(where))


def _release(where: Path, hold: _Held) -> None:
    if hold.handle is not None:
        with suppress(OSError):  # a file that stays locks nobody out
            if _same_file(where / NAME, hold.handle):
                (where / NAME).unlink()  # while the lock is held: see _acquire
        os.close(hold.handle)
    with suppress(OSError):  # there is something in it
        for path in hold.made:
            path.rmdir()


def _acquire(folder: Path, timeout: float) -> int | None:
    """Return the open, locked file, or None where the file system has no locks."""
    path, until = folder / NAME, time.monotonic() + timeout
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CofimaError(f"{folder} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(path, handle):
                os.ftruncate(handle, 0)
                _write_holder(handle)
                return handle
            os.close(handle)  # its holder unlinked it between open and flock: it locks nothing, try again
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
            os.close(handle)
            if time.monotonic() < until:
                time.sleep(0.2)
                continue
            raise CofimaError(
                f"{folder} is being written by {holder or 'another process'}: wait for it, or end it; "
                "nothing was changed"
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise CofimaError(f"{folder} cannot be locked: {error.strerror}") from error
            path.unlink(missing_ok=True)
            warnings.warn(
                f"{folder}: this file system has no locks ({error.strerror}); let one process at a time "
                "write there",
                CofimaWarning,
                stacklevel=4,
            )
            return None


def _same_file(path: Path, handle: int) -> bool:
    """Return True if the open file is the one at this path, and not one that was unlinked."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    """Write the holder's process into the lock file, for the message to others."""
    now = datetime.now().isoformat(" ", "minutes")
    with suppress(OSError):  # a full disk: the lock works all the same
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)
