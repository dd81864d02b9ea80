"""Folder locks: one thread of one process at a time writes into a model folder; any number may read it.

The lock is the system's own (flock) on a file in the folder. It ends with the process that holds it, even
if that is killed. The file stays when the lock is released: removing a file that others have opened to wait
for would let two of them in. It is never written to; who holds it is said in a file beside it.
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

from cofima.core.atomic import open_file
from cofima.core.errors import CofimaError, CofimaWarning

NAME = ".lock"
HOLDER = ".lock.holder"
PAUSE = 0.2  # seconds between two attempts


@dataclass
class _Held:
    """A folder locked by this process: the thread, the depth of nesting, and the folders created for it."""

    handle: int | None
    made: list[Path]
    thread: int
    times: int = 0


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


@contextmanager
def folder_lock(folder: Path, timeout: float = 0.0) -> Iterator[None]:
    """Lock a folder against others; raise if another one holds it after ``timeout`` seconds.

    The folder is created if it is not there, and removed again if it stays empty. The lock is reentrant
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
    """Take the lock, or take it once more; return the holder if that is somebody else, otherwise nothing."""
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
    with suppress(OSError):  # there is something in it
        if [path.name for path in where.iterdir()] == [NAME]:
            # Who waits for this very file finds, once it has the lock, that the file is gone: see _acquire.
            (where / NAME).unlink()
        for path in hold.made:
            path.rmdir()
    if hold.handle is not None:
        os.close(hold.handle)


def _acquire(folder: Path) -> int | str | None:
    """Return the open, locked file; the name of who holds it; or None where the file system has no locks."""
    path = folder / NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = _open(path)
        except OSError as error:
            reason = f"{path} is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise CofimaError(f"{folder} cannot be written: {reason}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(path, handle):
                _write_holder(folder)
                return handle
            os.close(handle)  # its holder unlinked it between open and flock: it locks nothing, try again
        except BlockingIOError:
            os.close(handle)
            return _read_holder(folder)
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
    """Open the file of a lock, which may not be there; not through a link, which may lead to any file."""
    how = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, how | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's, in a folder that several may write to
        return os.open(path, how | os.O_RDONLY)


def _same_file(path: Path, handle: int) -> bool:
    """Return True if the open file is the one at this path, and not one that was unlinked."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(folder: Path) -> None:
    """Write down the process, for the message to others."""
    now = datetime.now().isoformat(" ", "minutes")
    with suppress(OSError):  # a full disk: the lock works all the same
        (folder / HOLDER).unlink(missing_ok=True)
        with (folder / HOLDER).open("x") as file:  # a new file: never through a link
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n")


def _read_holder(folder: Path) -> str:
    with suppress(OSError), open_file(folder / HOLDER) as file:
        return file.read(200).decode(errors="replace").strip() or "another process"
    return "another process"
