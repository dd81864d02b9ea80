"""Files that are never half written: aside, fsync, rename."""

import os
from pathlib import Path

from cofima.errors import CofimaError


def write_text(path: Path, text: str) -> None:
    """Replace a file at once; on failure the old one stays as it is."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CofimaError(f"{path} could not be written ({error.strerror}); nothing was changed") from error


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path | None:
    """Return where to keep what can be computed again: in $COFIMA_CACHE, or with the user's other caches.

    None is nowhere: COFIMA_CACHE=off.
    """
    given = os.environ.get("COFIMA_CACHE")
    if given == "off":
        return None
    if given:
        return Path(given).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cofima"
    except RuntimeError:  # a user without a home
        return None
