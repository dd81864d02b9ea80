"""Rows of numbers found by name, in memory and in a folder that later runs and other processes share.

The folder holds files of some rows each, which are only ever added, and which are called by a hash of
their content. So nothing is locked or merged: two processes at once add two files, or the same one
twice, and a file that is damaged or belongs elsewhere is known by its name.
"""

import os
import shutil
import warnings
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.models.info import fingerprint

LIMIT = 4_000_000_000  # bytes in all keys; above, the keys that were not used for longest are removed
NAME = 16  # bytes


class FeatureCache:
    """Rows by name; without a folder they are kept in memory alone."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.rows: dict[bytes, Tensor] = {}
        self.files: dict[bytes, Path] = {}
        if folder is not None and folder.is_dir():
            _touch(folder)
            # not those aside: other processes write them at this moment, and rename them while they are read
            for file in sorted(folder.glob("[!.]*.safetensors")):
                self.files |= dict.fromkeys(_names(file), file)

    def __contains__(self, name: bytes) -> bool:
        """Tell whether a row is there; a file is read when the first of its rows is asked for."""
        if name not in self.rows and name in self.files:
            self._read(self.files[name])
        return name in self.rows

    def take(self, names: Iterable[bytes]) -> Tensor:
        """Return rows that are there, in order."""
        return torch.stack([self.rows[name] for name in names])

    def add(self, rows: dict[bytes, Tensor]) -> None:
        """Keep rows, also for others. Where they cannot be written the work goes on without."""
        self.rows |= rows
        if self.folder is None or not rows:
            return
        try:
            self._write(self.folder, rows)
            with suppress(FileNotFoundError):  # another process makes room as well
                _make_room(self.folder)
        except (OSError, CofimaError) as error:
            _warn(f"{self.folder}: features could not be kept for later runs ({error})")
            self.folder = None  # said once

    def _write(self, folder: Path, rows: dict[bytes, Tensor]) -> None:
        names = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, NAME)
        content = {"names": names, "rows": torch.stack(list(rows.values()))}
        with write_aside(folder / f"{_hash(folder, content)}.safetensors") as aside:
            save_file(content, aside)

    def _read(self, file: Path) -> None:
        """Take all rows of a file over, or forget the file if it is not what was written."""
        try:
            content = load_file(file)
            if _hash(file.parent, content) != file.stem:
                raise ValueError("its content is not what was written")
            self.rows |= dict(zip(_bytes(content["names"]), content["rows"], strict=True))
        except FileNotFoundError:  # another process made room
            pass
        except (OSError, SafetensorError, ValueError) as error:
            _discard(file, error)
        self.files = {name: other for name, other in self.files.items() if other != file}


def _names(file: Path) -> list[bytes]:
    """Return the names of a file's rows; none if it cannot be read."""
    try:
        with safe_open(file, "pt") as content:
            return _bytes(content.get_tensor("names"))
    except FileNotFoundError:
        return []
    except (OSError, SafetensorError, TypeError) as error:
        _discard(file, error)
        return []


def _bytes(names: Tensor) -> list[bytes]:
    return [bytes(name) for name in names.numpy()]


def _hash(folder: Path, content: dict[str, Tensor]) -> str:
    """Return what a file is called; it counts in which folder it lies."""
    return sha256(f"{folder.name} {fingerprint(content)}".encode()).hexdigest()


def _discard(file: Path, error: Exception) -> None:
    """Say that a file is of no use, and remove it if it is called as we call ours."""
    _warn(f"{file}: damaged or foreign ({error}); it is ignored, and its features are computed anew")
    if len(file.stem) == 64:
        file.unlink(missing_ok=True)


def _touch(folder: Path) -> None:
    with suppress(OSError):  # read-only: then nobody makes room there either
        os.utime(folder)


def _make_room(used: Path) -> None:
    """Remove the keys that were not used for longest until the others fit, but not the one in use."""
    keys = [key for key in used.parent.iterdir() if key.is_dir()]
    sizes = {key: sum(file.stat().st_size for file in key.iterdir()) for key in keys}
    for key in sorted(keys, key=lambda key: key.stat().st_mtime):
        if key != used and sum(sizes.values()) > LIMIT:
            shutil.rmtree(key, ignore_errors=True)
            del sizes[key]


def _warn(text: str) -> None:
    warnings.warn(text, CofimaWarning, stacklevel=4)
