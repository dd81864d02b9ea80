"""Pictures become pixels: small ones as they are, a few in memory, many in a cache on disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from cofima.data import cache as caches
from cofima.data.forms import Form
from cofima.data.images import BadImageError, ImageSet
from cofima.data.reading import Content, fill, hash_of, readers, small, stacked
from cofima.data.source import Picture
from cofima.progress import SILENT, Progress

SMALL = 64  # pixels a side; images of one shape up to this are kept as they are
IN_MEMORY = 256_000_000  # bytes; more than this goes to disk


@dataclass(frozen=True, eq=False)
class Kept:
    """The pixels of some pictures; for each a hash of its content and what is wrong with it, if anything."""

    pixels: Tensor
    hashes: list[str]
    faults: list[str]
    cache: caches.Cache | None = None

    def fingerprint(self, images: ImageSet) -> str:
        """Return a hash of the images and labels in order.

        Of images on disk, it is made of the hashes of their files: reading all pixels would take long.
        """
        if self.cache is None:
            return images.fingerprint()
        digest = sha256(repr((len(images), self.cache.form)).encode())
        digest.update(images.labels.numpy().tobytes())
        for row in images.rows.tolist():
            digest.update(self.hashes[row].encode())
        return digest.hexdigest()


def keep(
    pictures: Sequence[Picture], form: Form, *, despite_faults: bool = False, progress: Progress = SILENT
) -> Kept:
    """Read every picture into the form, once; ``despite_faults`` keeps a cache with unreadable ones."""
    if (as_they_are := keep_small([pictures])) is not None:
        return as_they_are[0]
    if len(pictures) * form.bytes < IN_MEMORY:
        return _in_memory(pictures, form, progress)
    stamps = list(progress.track(map(_stamp, pictures), len(pictures), "looking for images read before"))
    cache = caches.cache_for(form, [picture.name for picture in pictures], stamps)
    progress.say(f"{len(pictures):,} images, {cache.bytes / 1e9:,.1f} GB, are kept in {cache.place}")
    found = caches.open_or_build(cache, pictures, progress)
    kept = Kept(cache.map(), [hashed for hashed, _ in found], [fault for _, fault in found], cache)
    if any(kept.faults) and not despite_faults:
        caches.remove(cache)  # mended files make another cache: this one would never be used again
    return kept


def keep_small(parts: Sequence[Sequence[Picture]]) -> list[Kept] | None:
    """Keep the images of all parts as they are, if they are small and share one shape; else return None."""
    pictures = [picture for part in parts for picture in part]
    contents = small(pictures, SMALL) if pictures and not _file(pictures[0].read) else None
    if contents is None:
        return None
    pixels, hashes = stacked(contents), list(map(hash_of, contents))
    kept, start = [], 0
    for part in parts:
        stop = start + len(part)
        kept.append(Kept(pixels[start:stop], hashes[start:stop], [""] * len(part)))
        start = stop
    return kept


def _in_memory(pictures: Sequence[Picture], form: Form, progress: Progress) -> Kept:
    pixels = torch.empty(len(pictures), *form.shape, dtype=torch.uint8)
    pool = readers()
    try:
        reading = fill(pixels, pictures, range(len(pictures)), form, pool)
        found = list(progress.track(reading, len(pictures), "reading images"))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, do not read the rest first
    return Kept(pixels, [hashed for hashed, _ in found], [fault for _, fault in found])


def _stamp(picture: Picture) -> str:
    """Return what changes with a picture: size and time of its file, or else a hash of its content."""
    path = _file(picture.read)
    try:
        if path is None:
            return hash_of(picture.read())
        about = path.stat()
    except (OSError, BadImageError) as error:
        return f"unreadable: {error}"
    return f"{about.st_size} bytes, {about.st_mtime_ns}"


def _file(read: Callable[[], Content]) -> Path | None:
    """Return the file of a picture that is read by ``path.read_bytes``, the whole of it."""
    owner = getattr(read, "__self__", None)
    return owner if isinstance(owner, Path) and read.__name__ == "read_bytes" else None
