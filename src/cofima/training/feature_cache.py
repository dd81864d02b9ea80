"""Cache of feature vectors by key, in memory and in a folder shared with later runs and other processes.

The folder holds files of some rows each. Files are only ever added, and each is named by a hash of its
content. So nothing needs a lock: two concurrent processes add two files, or the same file twice, and a file
that is damaged or belongs to another folder does not match its name.
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
from safetensors.torch import load_file
from torch import Tensor

from cofima.core.atomic import write_aside
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.models.info import fingerprint
from cofima.weights.mmap import write_tensors

LIMIT = 4_000_000_000  # total bytes of all caches; beyond it, the least recently used ones are removed
KEY_BYTES = 16


class FeatureCache:
    """Feature vectors by key; without a folder they are cached in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.rows: dict[bytes, Tensor] = {}
        self.files: dict[bytes, Path] = {}
        # Files with a leading dot are being written by other processes, which rename them when done.
        for file in [] if folder is None else _files(folder, "[!.]*.safetensors"):
            self.files |= dict.fromkeys(_keys_of(file), file)

    def __contains__(self, key: bytes) -> bool:
        """Return True if the key is cached; a file is read on the first access to one of its rows."""
        if key not in self.rows and key in self.files:
            self._read(self.files[key])
        return key in self.rows

    def take(self, keys: Iterable[bytes]) -> Tensor:
        """Return the rows of cached keys, in the given order."""
        return torch.stack([self.rows[key] for key in keys])

    def add(self, rows: dict[bytes, Tensor]) -> None:
        """Cache rows and write them to the folder; if writing fails, warn once and continue in memory."""
        self.rows |= rows
        if self.folder is None or not rows:
            return
        try:
            self._write(self.folder, rows)
            with suppress(FileNotFoundError):  # another process may be removing old caches, too
                _remove_old_caches(self.folder)
        except (OSError, CofimaError) as error:
            _warn(f"{self.folder}: features could not be kept for later runs ({error})")
            self.folder = None

    def _write(self, folder: Path, rows: dict[bytes, Tensor]) -> None:
        keys = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, KEY_BYTES)
        content = {"names": keys, "rows": torch.stack(list(rows.values()))}
        with write_aside(folder / f"{_hash(folder, content)}.safetensors") as aside:
            write_tensors(aside, content)

    def _read(self, file: Path) -> None:
        """Read all rows of a file; discard it if its content does not match its name."""
        try:
            content = load_file(file)
            if _hash(file.parent, content) != file.stem:
                raise ValueError("its content is not what was written")
            self.rows |= dict(zip(_bytes(content["names"]), content["rows"], strict=True))
        except FileNotFoundError:  # another process removed it
            pass
        except (OSError, SafetensorError, ValueError) as error:
            _discard(file, error)
        self.files = {key: other for key, other in self.files.items() if other != file}


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a cache, and mark it as recently used; none if it cannot be listed."""
    try:
        found = sorted(folder.glob(pattern)) if folder.is_dir() else []
    except OSError:
        return []
    _touch(folder)
    return found


def _keys_of(file: Path) -> list[bytes]:
    """Return the keys of a file's rows; none if the file cannot be read."""
    try:
        with safe_open(file, "pt") as content:
            return _bytes(content.get_tensor("names"))
    except FileNotFoundError:
        return []
    except (OSError, SafetensorError, TypeError) as error:
        _discard(file, error)
        return []


def _bytes(keys: Tensor) -> list[bytes]:
    if keys.dtype != torch.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise TypeError(f"keys of {keys.dtype} and the shape {list(keys.shape)}")
    return [bytes(key) for key in keys.numpy()]


def _hash(folder: Path, content: dict[str, Tensor]) -> str:
    """Return the name of a file; it depends on the folder, so that a file moved elsewhere does not match."""
    return sha256(f"{folder.name} {fingerprint(content)}".encode()).hexdigest()


def _discard(file: Path, error: Exception) -> None:
    """Warn about an unusable file, and remove it if its name has the form of a cache file's."""
    _warn(f"{file}: damaged or foreign ({error}); it is ignored, and its features are computed anew")
    if len(file.stem) == 64:
        with suppress(OSError):  # a read-only folder
            file.unlink()


def _touch(folder: Path) -> None:
    with suppress(OSError):  # a read-only folder, where no old caches are removed either
        os.utime(folder)


def _remove_old_caches(used: Path) -> None:
    """Remove the least recently used caches until the rest fit into ``LIMIT``; never the one in use."""
    caches = [folder for folder in used.parent.iterdir() if folder.is_dir()]
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in caches}
    for folder in sorted(caches, key=lambda folder: folder.stat().st_mtime):
        if folder != used and sum(sizes.values()) > LIMIT:
            shutil.rmtree(folder, ignore_errors=True)
            del sizes[folder]


def _warn(text: str) -> None:
    warnings.warn(text, CofimaWarning, stacklevel=4)
