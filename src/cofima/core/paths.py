"""Paths that a user wrote: home folders, names that are too long, folders that may not be read."""

from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.core.names import shortened


def expand(path: str | Path) -> Path:
    """Return a path with ``~`` and ``~user`` replaced; raise if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CofimaError(f"{shortened(str(path))}: there is no such home folder") from error


def exists(path: Path) -> bool:
    """Return True if there is a file or folder; raise where the system cannot say."""
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # too long, a folder that may not be read, a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise CofimaError(f"{shortened(str(path))}: {reason.lower()}") from error
