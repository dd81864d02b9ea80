"""Differences between Unix and Windows: everything that only Unix has, beside its counterpart.

No other module names what only one of them has (``tests/test_architecture.py``). Locks are those of
``filelock``, which knows both systems.
"""

import errno
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

UNIX = hasattr(os, "getuid")  # and not the system's name, so that a test can take Unix away
# Windows has Ctrl-Break and the closing of a console where Unix has the hang-up of a terminal.
HANG_UP: signal.Signals = getattr(signal, "SIGHUP", None) or signal.SIGBREAK  # type: ignore[attr-defined]
OUT_OF_MEMORY = (
    -int(getattr(signal, "SIGKILL", 0)) or None
)  # the exit code of a process that Linux ended for it
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # without it, opening a pipe waits for somebody who writes to it
_BYTES = getattr(os, "O_BINARY", 0)  # without it, Windows translates the ends of lines
_PATIENCE = 2.0  # seconds in which another program of Windows may let go of a file
_place = threading.Lock()


def peak_memory() -> float:
    """Return the most memory (bytes) that this process has had; 0 where the system does not tell."""
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return _windows_peak_memory()


def reset_peak_memory() -> None:
    """Let the peak of this process's memory begin anew, which only Linux can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")


def write_at(handle: int, content: memoryview, at: int) -> None:
    """Write all of ``content`` from byte ``at`` of a file on, whatever other threads write in it."""
    while len(content):
        done = _write_some(handle, content, at)
        content, at = content[done:], at + done


def _write_some(handle: int, content: memoryview, at: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, content, at)
    with _place:  # the place is one for all threads where it must be set first
        os.lseek(handle, at, os.SEEK_SET)
        return os.write(handle, content)


def allocate(handle: int, size: int) -> None:
    """Extend a file and allocate its blocks: a full disk raises here, not as SIGBUS in a later write."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:  # macOS and Windows
        os.ftruncate(handle, size)


def size_on_disk(path: Path) -> int:
    """Return the bytes that a file takes; a file may be longer where nothing was written to parts of it."""
    about = path.stat()
    return about.st_blocks * 512 if hasattr(about, "st_blocks") else about.st_size


def open_to_read(path: Path) -> int:
    """Open a path for reading, and return at once even if it is a pipe."""
    return os.open(path, os.O_RDONLY | _NO_WAIT | _BYTES)


def open_unlinked(path: Path, how: int, mode: int = 0o666) -> int:
    """Open a file, but not through a link, which may lead anywhere: raise OSError (ELOOP) for one."""
    if not _NO_LINK:
        _refuse_link(path)
    handle = os.open(path, how | _NO_LINK | _NO_WAIT | _BYTES, mode)
    try:
        if not _NO_LINK:
            _refuse_link(path)  # one that came in between
    except OSError:
        os.close(handle)
        raise
    return handle


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def has_name(path: Path, handle: int) -> bool:
    """Return True if an open file is the one at a path, and not one that was unlinked."""
    if not UNIX:
        return True  # what is open cannot be unlinked
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def unlink_and_close(path: Path, handle: int) -> None:
    """Remove and close the locked file of a lock that nobody else holds.

    Unix unlinks it while it is locked: who waits for it finds then that it is gone (:func:`has_name`).
    Windows unlinks no open file, neither ours nor that of one who waits, so there it is closed first.
    """
    try:
        if UNIX:
            path.unlink()
    finally:
        os.close(handle)
    if not UNIX:
        path.unlink()


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power cut.

    Windows flushes only what is open for writing, and cannot open folders; NTFS keeps a journal of renames.
    """
    if not UNIX and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if UNIX else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(source: Path, target: Path) -> None:
    """Rename a file, in place of another, or a folder, in place of an empty one, in one step.

    Windows does not rename to the name of a folder, and not while another program, such as a scanner for
    viruses, has one of the two open: it is asked again for a moment.
    """
    until = time.monotonic() + (0 if UNIX else _PATIENCE)
    while True:
        try:
            if not UNIX and source.is_dir() and target.is_dir():
                target.rmdir()
            source.replace(target)
        except PermissionError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)
        else:
            return


def is_mine(about: os.stat_result) -> bool:
    """Return True if a file is this user's; always on Windows, where users share no temporary folder."""
    return not UNIX or about.st_uid == os.getuid()


def is_running(process: int) -> bool:
    """Return True if a process of this machine is running, whoever's it is."""
    if not UNIX:
        return _windows_is_running(process)
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def _windows_is_running(process: int) -> bool:
    """Ask for the exit code of a process; os.kill would end it."""
    import ctypes

    libraries = getattr(ctypes, "windll", None)
    if libraries is None:
        return True  # nothing of one that may be running is touched
    kernel, limited_information, still_active, denied = libraries.kernel32, 0x1000, 259, 5
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = kernel.OpenProcess(limited_information, False, process & 0xFFFFFFFF)
    if not handle:
        return bool(kernel.GetLastError() == denied)
    code = ctypes.c_uint32()
    kernel.GetExitCodeProcess(ctypes.c_void_p(handle), ctypes.byref(code))
    kernel.CloseHandle(ctypes.c_void_p(handle))
    return code.value == still_active


def _windows_peak_memory() -> float:
    """Ask the process's memory counters for the peak of its working set."""
    import ctypes

    class Counters(ctypes.Structure):
        """The system's PROCESS_MEMORY_COUNTERS."""

        _fields_ = (
            ("size", ctypes.c_uint32),
            ("page_faults", ctypes.c_uint32),
            ("peak_working_set", ctypes.c_size_t),
            ("rest", ctypes.c_size_t * 7),
        )

    libraries = getattr(ctypes, "windll", None)
    if libraries is None:
        return 0.0
    counters = Counters(size=ctypes.sizeof(Counters))
    ask = libraries.kernel32.K32GetProcessMemoryInfo
    ask.argtypes = [ctypes.c_void_p, ctypes.POINTER(Counters), ctypes.c_uint32]
    libraries.kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    told = ask(libraries.kernel32.GetCurrentProcess(), ctypes.byref(counters), counters.size)
    return float(counters.peak_working_set) if told else 0.0
