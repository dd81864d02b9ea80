"""User-supplied paths: home folders, names that are too long, unreadable folders."""

from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.core.names import shortened


def expand(path: str | Path) -> Path:
    """Expand ``~`` and ``~user`` in a path; raise if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CofimaError(f"{shortened(str(path))}: there is no such home folder") from error


def exists(path: Path) -> bool:
    """Return True if a file or folder exists; raise if this cannot be determined."""
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # too long, an unreadable folder, a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise CofimaError(f"{shortened(str(path))}: {reason.lower()}") from error
