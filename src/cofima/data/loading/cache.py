"""Memory-mapped cache of decoded pixels on disk.

A cache is a folder with ``pixels.u8``, the concatenated images, and ``index.json``, which is written last:
without it, the build was interrupted, and the journal records how far it got. Index and journal have
checksums of the pixels, which are verified whenever a cache is opened, since a flipped bit would change an
image. Only the holder of the lock next to the folder builds it, or removes it if it is damaged.
"""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cofima.core.atomic import cache_folder, json_digest, write_text
from cofima.core.errors import CofimaError
from cofima.core.lock import lock_file, try_lock_file
from cofima.core.progress import Progress
from cofima.core.system import allocate, size_on_disk
from cofima.data.loading.pixel_format import PixelFormat

FORMAT = 2
PIXELS, INDEX, JOURNAL = "pixels.u8", "index.json", "journal.jsonl"
SMALL_CACHES = 4_000_000_000  # total bytes of small caches; beyond it, the least recently used are removed
_CHUNK = 64_000_000  # bytes decoded, flushed and recorded at once: at most this much is lost by a kill

HashAndFault = tuple[str, str]  # of a sample's content; the fault is empty if it is readable
FillRows = Callable[[Tensor, Iterable[int]], Iterator[HashAndFault]]  # loads samples into these rows
Opened = tuple[Tensor, list[HashAndFault]]  # pixels, and hash and fault of each sample


class Piece(NamedTuple):
    """Samples that were read and flushed together, and the checksum of their pixels."""

    found: list[HashAndFault]
    checksum: int


@dataclass(frozen=True)
class Cache:
    """Folder, format and number of cached images."""

    place: Path
    pixel_format: PixelFormat
    count: int

    @property
    def bytes(self) -> int:
        """Size of the pixels."""
        return self.count * self.pixel_format.bytes

    def map(self) -> Tensor:
        """Return the pixels as a memory-mapped tensor."""
        # copy on write: PyTorch has no read-only tensors, and the file must not change
        shape = (self.count, *self.pixel_format.shape)
        return torch.from_numpy(np.memmap(self.place / PIXELS, np.uint8, mode="c", shape=shape))


def folder() -> Path:
    """Return the folder of all caches."""
    return cache_folder() / "pixels"


def cache_for(pixel_format: PixelFormat, names: Sequence[str], stamps: Sequence[str]) -> Cache:
    """Return the cache of samples with these names and stamps; nothing is read or written."""
    said = json.dumps([FORMAT, asdict(pixel_format), list(names), list(stamps)])
    return Cache(folder() / sha256(said.encode()).hexdigest()[:32], pixel_format, len(names))


def open_or_build(cache: Cache, fill: FillRows, progress: Progress) -> Opened:
    """Return the pixels, and hash and fault of each sample; read samples that are not cached yet."""
    try:
        return _open(cache, progress) or _open_or_build_alone(cache, fill, progress)
    except OSError as error:
        raise CofimaError(
            f"{cache.place} cannot be used ({error.strerror}); what is in it is kept, and the same "
            "command continues. Set COFIMA_CACHE to keep images elsewhere."
        ) from error


def remove(cache: Cache) -> None:
    """Delete a cache, unless another process is building it, or it is not writable."""
    _remove_unlocked(cache.place)


def remove_old(used: Cache, limit: int) -> None:
    """Remove the least recently used caches below ``limit`` bytes until the rest fit; never ``used``.

    This is safe, since their users have copied them into memory. A cache being built is locked, and kept.
    """
    with suppress(OSError):  # another process does the same, or the folder is not writable
        os.utime(used.place)
        sizes = {path.parent: size_on_disk(path) for path in used.place.parent.glob(f"*/{PIXELS}")}
        sizes = {place: size for place, size in sizes.items() if size < limit}
        for place in sorted(sizes, key=lambda place: place.stat().st_mtime):
            if sum(sizes.values()) <= SMALL_CACHES:
                break
            if place != used.place and _remove_unlocked(place):
                del sizes[place]


def _open_or_build_alone(cache: Cache, fill: FillRows, progress: Progress) -> Opened:
    _require_space(cache)
    cache.place.mkdir(parents=True, exist_ok=True)
    with _locked(cache.place.with_suffix(".lock"), progress):
        opened = _open(cache, progress)  # another process may have built it while this one waited
        if opened is None:
            _delete_damaged(cache, progress)
            _build(cache, fill, progress)
            opened = _open(cache, progress)
    if opened is None:
        raise OSError(errno.EIO, "its pixels are not what was written")
    return opened


def _build(cache: Cache, fill: FillRows, progress: Progress) -> None:
    cache.place.mkdir(exist_ok=True)
    with (cache.place / PIXELS).open("ab") as file:
        file.truncate(cache.bytes)
        allocate(file.fileno(), cache.bytes)
    pieces = _resume_journal(cache, progress)
    shape = (cache.count, *cache.pixel_format.shape)
    pixels = np.memmap(cache.place / PIXELS, np.uint8, mode="r+", shape=shape)
    label, done = f"reading images into {cache.place}", sum(len(piece.found) for piece in pieces)
    for _ in progress.track(_read(cache, pixels, fill, pieces), cache.count - done, label):
        pass
    said = {"format": FORMAT, "form": asdict(cache.pixel_format), "pieces": pieces}
    write_text(cache.place / INDEX, json.dumps(said | {"sha256": json_digest(said)}))


def _read(
    cache: Cache, pixels: "np.memmap[Any, Any]", fill: FillRows, pieces: list[Piece]
) -> Iterator[HashAndFault]:
    """Read the samples after those of ``pieces``; add and record new pieces once they are on disk."""
    target, step = torch.from_numpy(pixels), max(1, _CHUNK // cache.pixel_format.bytes)
    with (cache.place / JOURNAL).open("a", encoding="utf-8") as journal:
        for start in range(sum(len(piece.found) for piece in pieces), cache.count, step):
            stop, found = min(start + step, cache.count), []
            for one in fill(target, range(start, stop)):
                found.append(one)
                yield one
            pixels.flush()
            pieces.append(Piece(found, zlib.crc32(pixels[start:stop].data)))
            journal.write(json.dumps(pieces[-1]) + "\n")
            journal.flush()
            os.fsync(journal.fileno())


def _resume_journal(cache: Cache, progress: Progress) -> list[Piece]:
    """Return the pieces of an interrupted build that are verified to be on disk; drop the rest."""
    path = cache.place / JOURNAL
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    said = []
    with suppress(ValueError):  # the last line may be incomplete
        for line in lines:
            said.append(json.loads(line))
    pieces = _intact(cache.map(), said)
    write_text(path, "".join(json.dumps(piece) + "\n" for piece in pieces))
    if pieces:
        done = sum(len(piece.found) for piece in pieces)
        progress.say(f"{done:,} of {cache.count:,} images were read before")
    return pieces


def _intact(pixels: Tensor, said: Iterable[Any]) -> list[Piece]:
    """Return the recorded pieces up to the first whose pixels do not match their checksum."""
    pieces, start = [], 0
    with suppress(ValueError, TypeError):  # not a valid piece
        for found, checksum in said:
            piece = Piece([(str(hashed), str(fault)) for hashed, fault in found], checksum)
            stop = start + len(piece.found)
            if zlib.crc32(pixels[start:stop].numpy().data) != checksum or not start < stop <= len(pixels):
                break
            pieces.append(piece)
            start = stop
    return pieces


def _open(cache: Cache, progress: Progress) -> Opened | None:
    """Return the content of a cache, or None if it is missing, incomplete or damaged."""
    try:
        said = json.loads((cache.place / INDEX).read_text("utf-8"))
        if said.pop("sha256") != json_digest(said) or (cache.place / PIXELS).stat().st_size != cache.bytes:
            return None
        pixels, pieces = cache.map(), said["pieces"]
        label = f"checking the pixels in {cache.place}"
        intact = _intact(pixels, progress.track(pieces, len(pieces), label))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # damaged
        return None
    found = [one for piece in intact for one in piece.found]
    if len(found) != cache.count:
        return None
    # the journal is obsolete now; its process may have been killed before removing it
    with suppress(OSError):  # a read-only cache
        (cache.place / JOURNAL).unlink()
    return pixels, found


def _delete_damaged(cache: Cache, progress: Progress) -> None:
    """Delete a cache that was complete and is now damaged; the caller holds its lock."""
    if (cache.place / INDEX).exists():
        progress.say(f"{cache.place} is damaged (its content is not what was written) and is built again")
        _delete(cache.place)


def _require_space(cache: Cache) -> None:
    # not the cache's own folder: another process may be deleting it because it is damaged
    there = next(path for path in cache.place.absolute().parents if path.is_dir())
    if not os.access(there, os.W_OK):
        raise CofimaError(
            f"images cannot be kept in {cache.place}: {there} may not be written to; set COFIMA_CACHE to a "
            "folder that may"
        )
    written = 0
    with suppress(FileNotFoundError, NotADirectoryError):
        written = size_on_disk(cache.place / PIXELS)
    free, needed = shutil.disk_usage(there).free, cache.bytes - written
    if needed > free:
        raise CofimaError(
            f"{cache.place} needs {needed / 1e9:,.1f} GB for {cache.count:,} images, and "
            f"{free / 1e9:,.1f} GB are free there: set COFIMA_CACHE to a folder with more "
            f"room, or delete caches that are not needed any more from {cache.place.parent}"
        )


def _remove_unlocked(place: Path) -> bool:
    """Delete the folder of a cache if no process holds its lock; return True if deleted, without waiting."""
    with suppress(OSError), place.with_suffix(".lock").open("ab") as file:
        if try_lock_file(file.fileno()):
            _delete(place)
            return True
    return False


def _delete(place: Path) -> None:
    (place / INDEX).unlink(missing_ok=True)  # first: without it, the rest is not taken for a cache
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock for building a cache; it is released if the process dies."""
    said = f"waiting for another process that reads the same images into {path.parent}"
    with path.open("ab") as file:
        lock_file(file.fileno(), lambda: progress.say(said))
        yield
