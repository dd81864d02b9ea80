"""The folder of uploads to the page: removed when the page ends or, after a crash, when the next starts."""

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cofima.core.lock import try_lock_file
from cofima.core.system import is_mine, open_unlinked

PREFIX, LOCK = "cofima-app-", ".lock"
_STARTING = 60  # seconds that a new page has to lock its folder


@contextmanager
def upload_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new, empty folder, removed at the end; first remove those left behind by killed pages."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    clear(parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name, _lock(Path(name)):
        files = Path(name) / "files"
        files.mkdir()
        yield files


def clear(parent: Path) -> None:
    """Remove the folders of pages that are no longer running; a running page holds a lock on its folder."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, or removed in the meantime
            about = folder.lstat()
            mine = stat.S_ISDIR(about.st_mode) and is_mine(about)  # anybody may write into /tmp
            if mine and ((folder / LOCK).exists() or time.time() - about.st_mtime > _STARTING):
                with _lock(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)  # again, as Windows keeps the open lock file


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raise OSError if another page holds it, even one of this process."""
    handle = open_unlinked(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock_file(handle):
            raise BlockingIOError(errno.EAGAIN, "a page holds it", str(folder))
        yield
    finally:
        os.close(handle)
