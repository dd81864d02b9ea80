"""Differences between Unix and Windows: peak memory, writing at a place of a file, waiting for a file.

Everything that only Unix has is here, beside its counterpart; other modules ask these functions. (Locks of
folders, signals and the flushing of folders are in :mod:`cofima.core.lock`, ``signals`` and ``atomic``.)
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAUSE = 0.2  # seconds between two attempts where a system cannot wait for a lock itself
OUT_OF_MEMORY = (
    -int(getattr(signal, "SIGKILL", 0)) or None
)  # the exit code of a process that Linux ended for it
_place = threading.Lock()


def peak_memory() -> float:
    """Return the most memory (bytes) that this process has had; 0 where the system does not tell."""
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
    return _windows_peak_memory()


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


def lock_file(file: IO[Any], waiting: Callable[[], None]) -> None:
    """Lock an open file against other processes, until it is closed; call ``waiting`` once if one has it."""
    if try_lock_file(file):
        return
    waiting()
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return
    while not try_lock_file(file):
        time.sleep(PAUSE)


def try_lock_file(file: IO[Any]) -> bool:
    """Lock an open file until it is closed, unless another process has it; return False then."""
    if fcntl is None:
        return _windows_lock(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _windows_lock(file: IO[Any]) -> bool:
    """Lock the first byte of a file, if no other process has; Windows frees it when the file is closed."""
    import msvcrt

    file.seek(0)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True


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
