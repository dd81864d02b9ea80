"""Files that are never half written: aside, fsync, rename."""

import os
from collections.abc import Mapping
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


def write_texts(texts: Mapping[str, str], folder: str | Path) -> list[Path]:
    """Write files by their names into a folder, each replaced as a whole or not at all."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CofimaError(f"the folder {folder} cannot be made: {error.strerror}") from None
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Return the folder for what can be made again: $COFIMA_CACHE, or ~/.cache/cofima."""
    try:
        return Path(os.environ.get("COFIMA_CACHE") or "~/.cache/cofima").expanduser()
    except RuntimeError as error:  # a user without a home
        raise CofimaError("there is no home folder for a cache: set COFIMA_CACHE to a folder") from error
