"""Differences between Unix and Windows: all Unix-only calls, each with its counterpart.

No other module uses platform-specific calls (``tests/test_architecture.py``). Locks come from ``filelock``,
which supports both.
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

UNIX = hasattr(os, "getuid")  # a feature test instead of the system's name, so that a test can remove it
# Windows has Ctrl-Break and closing of a console where Unix has the hang-up of a terminal.
HANG_UP: signal.Signals = getattr(signal, "SIGHUP", None) or signal.SIGBREAK  # type: ignore[attr-defined]
OUT_OF_MEMORY = (
    -int(getattr(signal, "SIGKILL", 0)) or None
)  # exit code of a process that Linux killed for lack of memory
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # without it, opening a pipe blocks until there is a writer
_BYTES = getattr(os, "O_BINARY", 0)  # without it, Windows translates line endings
_PATIENCE = 2.0  # seconds to wait on Windows for another program to close a file
_place = threading.Lock()


def peak_memory() -> float:
    """Return the peak memory of this process in bytes; 0 if it is not available."""
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return _windows_peak_memory()


def reset_peak_memory() -> None:
    """Reset the peak memory of this process; only Linux supports it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")


def write_at(handle: int, content: memoryview, at: int) -> None:
    """Write all of ``content`` at byte ``at`` of a file; safe with other threads writing to the file."""
    while len(content):
        done = _write_some(handle, content, at)
        content, at = content[done:], at + done


def _write_some(handle: int, content: memoryview, at: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, content, at)
    with _place:  # without pwrite, all threads share one file position
        os.lseek(handle, at, os.SEEK_SET)
        return os.write(handle, content)


def allocate(handle: int, size: int) -> None:
    """Extend a file and allocate its blocks: a full disk raises here, instead of SIGBUS on a later write."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:  # macOS and Windows
        os.ftruncate(handle, size)


def size_on_disk(path: Path) -> int:
    """Return the bytes that a file occupies on disk; less than its length for a sparse file."""
    about = path.stat()
    return about.st_blocks * 512 if hasattr(about, "st_blocks") else about.st_size


def open_to_read(path: Path) -> int:
    """Open a path for reading without blocking, even if it is a pipe."""
    return os.open(path, os.O_RDONLY | _NO_WAIT | _BYTES)


def open_unlinked(path: Path, how: int, mode: int = 0o666) -> int:
    """Open a file; raise OSError (ELOOP) for a symbolic link, which may point anywhere."""
    if not _NO_LINK:
        _refuse_link(path)
    handle = os.open(path, how | _NO_LINK | _NO_WAIT | _BYTES, mode)
    try:
        if not _NO_LINK:
            _refuse_link(path)  # in case one was created in between
    except OSError:
        os.close(handle)
        raise
    return handle


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def has_name(path: Path, handle: int) -> bool:
    """Return True if an open file is still the one at a path, and was not unlinked."""
    if not UNIX:
        return True  # Windows cannot unlink an open file
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def unlink_and_close(path: Path, handle: int) -> None:
    """Remove and close the file of a lock held by this process.

    On Unix it is unlinked while locked: a waiting process then finds that it is gone (:func:`has_name`).
    Windows cannot unlink an open file, neither ours nor that of a waiting process, so it is closed first.
    """
    try:
        if UNIX:
            path.unlink()
    finally:
        os.close(handle)
    if not UNIX:
        path.unlink()


def sync(path: Path) -> None:
    """Flush a file, or the renames in a folder, to disk, so that they survive a power failure.

    Windows only flushes files open for writing, and cannot open folders; NTFS journals renames.
    """
    if not UNIX and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if UNIX else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(source: Path, target: Path) -> None:
    """Rename atomically: a file may replace another file, a folder may replace an empty one.

    Windows cannot rename to an existing folder, nor while another program, such as a virus scanner, has one
    of the two open: the call is retried for a moment.
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
    """Return True if this user owns a file; always on Windows, where users share no temporary folder."""
    return not UNIX or about.st_uid == os.getuid()


def is_running(process: int) -> bool:
    """Return True if a process of any user is running on this machine."""
    if not UNIX:
        return _windows_is_running(process)
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # owned by another user
        return True
    return True


def _windows_is_running(process: int) -> bool:
    """Query the exit code of a process; os.kill would end it on Windows."""
    import ctypes

    libraries = getattr(ctypes, "windll", None)
    if libraries is None:
        return True  # unknown: assume that it is running, so that its files are left alone
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
    """Return the peak working set from the memory counters of the process."""
    import ctypes

    class Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS of the Windows API."""

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
