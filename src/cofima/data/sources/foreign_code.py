"""Sandbox for readers of other libraries, against code hidden in data files.

Some readers unpickle, and Pillow runs Ghostscript for some files; both can execute arbitrary code of the
file's author. Python calls audit hooks before each such operation, and a hook that raises prevents it.
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
    """Forbid this thread to unpickle anything but plain values and arrays, or to start programs."""
    _install()
    before = getattr(_here, "restrained", False)
    _here.restrained = True
    try:
        yield
    finally:
        _here.restrained = before


@cache
def _install() -> None:
    sys.addaudithook(_hook)  # permanent: audit hooks cannot be removed


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_here, "restrained", False):
        return
    if event == "pickle.find_class" and arguments[:2] not in ALLOWED:
        raise BadImageError(f"it unpickles {'.'.join(map(str, arguments[:2]))}, which could run any code")
    if event in _PROGRAMS:
        raise BadImageError("it would have another program started")
