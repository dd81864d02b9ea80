"""One process at a time writes into a model folder; any number may read it.

The lock is the system's own (flock) on a file in the folder. It ends with the process that holds it, also
if that is killed, and the file is taken away with it.
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
class _Hold:
    """A folder that this process holds, how often, and which folders were made for it."""

    handle: int | None
    made: list[Path]
    times: int = 0


_holds: dict[Path, _Hold] = {}
_guard = threading.Lock()


@contextmanager
def alone(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a folder against other processes, within; refuse it where another one holds it.

    The folder is made if it is not there, and taken away again if nothing came into it. A process that
    holds it already may hold it once more: what its threads do is its own affair. ``patience`` says how
    many seconds to wait for a holder that is about to end.
    """
    where = folder.resolve()
    with _guard:
        if where not in _holds:
            made = [path for path in (where, *where.parents) if not path.exists()]
            _holds[where] = _Hold(_take(folder, patience), made)
        _holds[where].times += 1
    try:
        yield
    finally:
        with _guard:
            _holds[where].times -= 1
            if not _holds[where].times:
                _release(where, _holds.pop(where))


def _release(where: Path, hold: _Hold) -> None:
    if hold.handle is not None:
        with suppress(OSError):  # what is left of it holds nobody up
            if _is(where / NAME, hold.handle):
                (where / NAME).unlink()  # while it is held: see _take
        os.close(hold.handle)
    with suppress(OSError):  # there is something in it
        for path in hold.made:
            path.rmdir()


def _take(folder: Path, patience: float) -> int | None:
    """Return the open file that holds the folder, or None where the file system knows no locks."""
    path, until = folder / NAME, time.monotonic() + patience
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CofimaError(f"{folder} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, handle):
                os.ftruncate(handle, 0)
                _sign(handle)
                return handle
            os.close(handle)  # its holder took the file away just now
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
                raise CofimaError(f"{folder} cannot be held: {error.strerror}") from error
            path.unlink(missing_ok=True)
            warnings.warn(
                f"{folder}: this file system has no locks ({error.strerror}); let one process at a time "
                "write there",
                CofimaWarning,
                stacklevel=4,
            )
            return None


def _is(path: Path, handle: int) -> bool:
    """Tell whether the open file is the one at this path, and not one that was taken away."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sign(handle: int) -> None:
    """Write who holds the folder, for those who are refused."""
    now = datetime.now().isoformat(" ", "minutes")
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)
