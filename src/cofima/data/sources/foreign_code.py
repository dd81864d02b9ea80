"""Readers of other libraries, kept from what a data file could make them do.

They unpickle, and Pillow starts Ghostscript for some files. Both can run any code that the file's author
likes. Python tells its audit hooks of each such attempt before it happens, and one that raises prevents it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from cofima.data.loading.decoder import BadImageError
from cofima.data.sources.unpickle import ALLOWED

_PROGRAMS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
_here = threading.local()


@contextmanager
def restrained() -> Iterator[None]:
    """Refuse to unpickle anything but plain values and arrays, and to start programs, in this thread."""
    _install()
    before = getattr(_here, "restrained", False)
    _here.restrained = True
    try:
        yield
    finally:
        _here.restrained = before


@cache
def _install() -> None:
    sys.addaudithook(_hook)  # for the life of the process: hooks cannot be taken back


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_here, "restrained", False):
        return
    if event == "pickle.find_class" and arguments[:2] not in ALLOWED:
        raise BadImageError(f"it unpickles {'.'.join(map(str, arguments[:2]))}, which could run any code")
    if event in _PROGRAMS:
        raise BadImageError("it would have another program started")
