"""Cache of decoded pixels on disk, mapped into memory.

A cache is a folder with ``pixels.u8``, the images one after the other, and ``index.json``, which is
written last: without it, the folder is one that was cut off, and its journal says how far it came.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cofima.core.atomic import cache_folder, json_digest, write_text
from cofima.core.errors import CofimaError
from cofima.core.lock import lock_file, try_lock_file
from cofima.core.progress import Progress
from cofima.core.system import allocate, size_on_disk
from cofima.data.loading.pixel_format import PixelFormat

FORMAT = 1
PIXELS, INDEX, JOURNAL = "pixels.u8", "index.json", "journal.jsonl"
SMALL_CACHES = 4_000_000_000  # bytes of all small caches; above it, the least recently used are removed
_CHUNK = 64_000_000  # bytes that are decoded, flushed and noted at once: what a kill costs at most

HashAndFault = tuple[str, str]  # of a sample's content; the fault is empty where it can be read
FillRows = Callable[[Tensor, Iterable[int]], Iterator[HashAndFault]]  # loads samples into these rows


@dataclass(frozen=True)
class Cache:
    """Folder and format of the pixels of some samples."""

    place: Path
    pixel_format: PixelFormat
    count: int

    @property
    def bytes(self) -> int:
        """Return the size of the pixels."""
        return self.count * self.pixel_format.bytes

    def map(self) -> Tensor:
        """Return the pixels as a tensor that is read from disk where it is touched."""
        # copy on write: PyTorch has no tensors that cannot be written, and the file stays as it is
        shape = (self.count, *self.pixel_format.shape)
        return torch.from_numpy(np.memmap(self.place / PIXELS, np.uint8, mode="c", shape=shape))


def folder() -> Path:
    """Return the folder of all caches."""
    return cache_folder() / "pixels"


def cache_for(pixel_format: PixelFormat, names: Sequence[str], stamps: Sequence[str]) -> Cache:
    """Return the cache of samples with these names and stamps; nothing is read or written."""
    said = json.dumps([FORMAT, asdict(pixel_format), list(names), list(stamps)])
    return Cache(folder() / sha256(said.encode()).hexdigest()[:32], pixel_format, len(names))


def open_or_build(cache: Cache, fill: FillRows, progress: Progress) -> list[HashAndFault]:
    """Return hash and fault of each sample; read those that are not in the cache yet."""
    found = _read_index(cache, progress)
    if found is None:
        _require_space(cache)
        cache.place.mkdir(parents=True, exist_ok=True)
        with _locked(cache.place.with_suffix(".lock"), progress):
            found = _read_index(cache, progress)  # another process may have built it while this one waited
            if found is None:
                found = _build(cache, fill, progress)
    return found


def remove(cache: Cache) -> None:
    """Delete a cache."""
    (cache.place / INDEX).unlink(missing_ok=True)
    shutil.rmtree(cache.place, ignore_errors=True)


def remove_old(used: Cache, limit: int) -> None:
    """Remove the least recently used caches below ``limit`` bytes until the others fit, but never ``used``.

    Their users have copied them into memory. One that is being built is locked, and stays.
    """
    with suppress(OSError):  # another process does the same; or nothing may be written here
        os.utime(used.place)
        sizes = {path.parent: size_on_disk(path) for path in used.place.parent.glob(f"*/{PIXELS}")}
        sizes = {place: size for place, size in sizes.items() if size < limit}
        for place in sorted(sizes, key=lambda place: place.stat().st_mtime):
            if sum(sizes.values()) <= SMALL_CACHES:
                break
            if place != used.place and _unlocked(place.with_suffix(".lock")):
                shutil.rmtree(place, ignore_errors=True)
                del sizes[place]


def _build(cache: Cache, fill: FillRows, progress: Progress) -> list[HashAndFault]:
    try:
        with (cache.place / PIXELS).open("ab") as file:
            file.truncate(cache.bytes)
            allocate(file.fileno(), cache.bytes)
        found = _resume_journal(cache, progress)
        shape = (cache.count, *cache.pixel_format.shape)
        pixels = np.memmap(cache.place / PIXELS, np.uint8, mode="r+", shape=shape)
        label = f"reading images into {cache.place}"
        rest = progress.track(_read(cache, pixels, fill, found), cache.count - len(found), label)
        found += rest
        said = {"format": FORMAT, "form": asdict(cache.pixel_format), "found": found}
        write_text(cache.place / INDEX, json.dumps(said | {"sha256": json_digest(said)}))
        (cache.place / JOURNAL).unlink(missing_ok=True)
    except OSError as error:
        raise CofimaError(
            f"{cache.place} could not be written ({error.strerror}); what is in it is kept, and the same "
            "command continues. Set COFIMA_CACHE to keep images elsewhere."
        ) from error
    return found


def _read(
    cache: Cache, pixels: "np.memmap[Any, Any]", fill: FillRows, done: Sequence[HashAndFault]
) -> Iterator[HashAndFault]:
    """Read the samples after those that are done, piece by piece; note each piece once it is on disk."""
    target, step = torch.from_numpy(pixels), max(1, _CHUNK // cache.pixel_format.bytes)
    with (cache.place / JOURNAL).open("a", encoding="utf-8") as journal:
        for start in range(len(done), cache.count, step):
            stop, found = min(start + step, cache.count), []
            for one in fill(target, range(start, stop)):
                found.append(one)
                yield one
            pixels.flush()
            journal.write(json.dumps({"found": found, "crc": zlib.crc32(pixels[start:stop].data)}) + "\n")
            journal.flush()
            os.fsync(journal.fileno())


def _resume_journal(cache: Cache, progress: Progress) -> list[HashAndFault]:
    """Return the samples that the journal of an interrupted build proves to be on disk; drop the rest."""
    found: list[HashAndFault] = []
    good: list[str] = []
    path = cache.place / JOURNAL
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    pixels = cache.map().numpy()
    for line in lines:
        try:
            noted = json.loads(line)
            piece = [(str(hashed), str(fault)) for hashed, fault in noted["found"]]
            if zlib.crc32(pixels[len(found) : len(found) + len(piece)].data) != noted["crc"]:
                break
        except (ValueError, KeyError, TypeError):
            break  # the line that was being written
        found, good = found + piece, [*good, line]
    write_text(path, "".join(line + "\n" for line in good))
    if found:
        progress.say(f"{len(found):,} of {cache.count:,} images were read before")
    return found


def _read_index(cache: Cache, progress: Progress) -> list[HashAndFault] | None:
    """Return the entries of the index, or None where there is no cache; remove a damaged one."""
    if not (cache.place / INDEX).is_file():
        return None
    try:
        said = json.loads((cache.place / INDEX).read_text("utf-8"))
        if said.pop("sha256") != json_digest(said):
            raise ValueError("its index is not what was written")
        found = [(str(hashed), str(fault)) for hashed, fault in said["found"]]
        size = (cache.place / PIXELS).stat().st_size
        if size != cache.bytes or len(found) != cache.count:
            raise ValueError(f"{size:,} bytes of pixels, and {cache.bytes:,} were written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        progress.say(f"{cache.place} is damaged ({error}) and is built again")
        remove(cache)
        return None
    return found


def _require_space(cache: Cache) -> None:
    there = next(path for path in (cache.place, *cache.place.absolute().parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        raise CofimaError(
            f"images cannot be kept in {cache.place}: {there} may not be written to; set COFIMA_CACHE to a "
            "folder that may"
        )
    written = size_on_disk(cache.place / PIXELS) if (cache.place / PIXELS).is_file() else 0
    free, needed = shutil.disk_usage(there).free, cache.bytes - written
    if needed > free:
        raise CofimaError(
            f"{cache.place} needs {needed / 1e9:,.1f} GB for {cache.count:,} images, and "
            f"{free / 1e9:,.1f} GB are free there: set COFIMA_CACHE to a folder with more "
            f"room, or delete caches that are not needed any more from {cache.place.parent}"
        )


def _unlocked(path: Path) -> bool:
    """Return True if no process holds the lock; nothing waits."""
    with path.open("ab") as file:
        return try_lock_file(file.fileno())


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time build a cache; a process that dies lets the next one in."""
    said = f"waiting for another process that reads the same images into {path.parent}"
    with path.open("ab") as file:
        lock_file(file.fileno(), lambda: progress.say(said))
        yield
