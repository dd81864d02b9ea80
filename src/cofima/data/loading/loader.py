"""Multithreaded loading of samples into pixels of one format, in memory or in a cache on disk."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.data.image_set import ImageSet
from cofima.data.loading import cache as caches
from cofima.data.loading.cache import HashAndFault
from cofima.data.loading.decoder import BadImageError, decode, fault_of, read_file
from cofima.data.loading.pixel_format import PixelFormat

SMALL = 64  # pixels per side; arrays of one shape up to this size are stored unchanged
IN_MEMORY = 256_000_000  # bytes; anything larger is memory-mapped from disk
_AHEAD = 64  # images decoded in advance
_SETTLED = 2.0  # seconds; no file system has coarser timestamps

Content = bytes | NDArray[Any]  # an encoded file, or pixels
ImageLike = str | Path | Image.Image | NDArray[Any] | Tensor
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sample:
    """Image that has not been read yet.

    Attributes:
        name: Name that is the same on every machine, such as the path below the dataset's folder.
        label: Index of the class.
        read: Function that returns the encoded file, or pixels such as an array [H, W, 3].
    """

    name: str
    label: int
    read: Callable[[], Content]

    def content(self) -> Content:
        """Return the encoded file or the pixels; only regular files are read."""
        plain = getattr(self.read, "__func__", None) is Path.read_bytes  # not that of another path class
        return read_file(self.read.__self__) if plain else self.read()  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Loaded:
    """Pixels of loaded samples, with a content hash of each, and its fault if it is unreadable."""

    pixels: Tensor
    hashes: list[str]
    faults: list[str]
    cache: caches.Cache | None = None

    def fingerprint(self, images: ImageSet) -> str:
        """Return a hash of the images and labels in order.

        For cached images it is computed from the hashes of their files, since reading all pixels is slow.
        """
        if self.cache is None:
            return images.fingerprint()
        digest = sha256(f"({len(images)}, {self.cache.pixel_format.key})".encode())
        digest.update(images.labels.numpy().tobytes())
        for row in images.rows.tolist():
            digest.update(self.hashes[row].encode())
        return digest.hexdigest()


class DecodedImage(NamedTuple):
    """Decoded image: its pixels, or the fault of its file."""

    name: str
    pixels: Tensor | None
    fault: str


def load(
    samples: Sequence[Sample],
    pixel_format: PixelFormat,
    *,
    on_disk: bool = True,
    despite_faults: bool = False,
    progress: Progress = SILENT,
) -> Loaded:
    """Load every sample once; with ``on_disk``, cache them on disk for the next load.

    A cache with unreadable samples is only kept with ``despite_faults``. A small number of samples is always
    loaded into memory, and also cached if they are files.
    """
    if (as_they_are := load_small([samples])) is not None:
        return as_they_are[0]
    few = len(samples) * pixel_format.bytes < IN_MEMORY
    if on_disk and not few:
        return _load_cached(samples, pixel_format, despite_faults, progress)
    if on_disk and _are_settled_files(samples):
        try:
            loaded = _load_cached(samples, pixel_format, despite_faults, progress, few=True)
            # a copy in memory, so that the cache may be removed at any time
            return replace(loaded, pixels=loaded.pixels.clone(), cache=None)
        except CofimaError as error:
            progress.say(f"{error} The images are read into memory.")
    pixels = torch.empty(len(samples), *pixel_format.shape, dtype=torch.uint8)
    reading = _fill(samples, pixel_format, pixels, range(len(samples)))
    return _loaded(pixels, list(progress.track(reading, len(samples), "reading images")))


def _load_cached(
    samples: Sequence[Sample],
    pixel_format: PixelFormat,
    despite_faults: bool,
    progress: Progress,
    few: bool = False,
) -> Loaded:
    """Load samples from their cache, building it first if necessary; old small caches are removed."""
    stamps = list(progress.track(map(_stamp, samples), len(samples), "looking for images read before"))
    cache = caches.cache_for(pixel_format, [sample.name for sample in samples], stamps)
    if not few:
        progress.say(f"{len(samples):,} images, {cache.bytes / 1e9:,.1f} GB, are kept in {cache.place}")
    pixels, found = caches.open_or_build(
        cache, lambda pixels, places: _fill(samples, pixel_format, pixels, places), progress
    )
    loaded = _loaded(pixels, found, cache)
    if any(loaded.faults) and not despite_faults:
        caches.remove(cache)  # repaired files get another cache, so this one would never be used again
    if few:
        caches.remove_old(cache, IN_MEMORY)
    return loaded


def load_small(parts: Sequence[Sequence[Sample]]) -> list[Loaded] | None:
    """Load all parts unchanged if they are small uint8 arrays of one shape [H, W, 3]; else return None.

    Such images are enlarged in the transform instead: CIFAR takes 60 times less memory this way.
    """
    samples = [sample for part in parts for sample in part]
    if not samples or _file(samples[0].read):
        return None
    contents: list[NDArray[np.uint8]] = []
    for sample in samples:
        content = sample.content()
        if isinstance(content, bytes) or content.dtype != np.uint8 or content.ndim != 3:
            return None
        contents.append(content)
        if content.shape[2] != 3 or max(content.shape) > SMALL or content.shape != contents[0].shape:
            return None
    pixels = torch.from_numpy(np.stack(contents)).permute(0, 3, 1, 2).contiguous()
    found = [(hash_of(content), "") for content in contents]
    stops = accumulate(map(len, parts), initial=0)
    return [_loaded(pixels[start:stop], found[start:stop]) for start, stop in pairwise(stops)]


def check(
    samples: Sequence[Sample], progress: Progress, use: Callable[[int, Image.Image], object]
) -> list[HashAndFault]:
    """Decode every sample and pass it to ``use`` with its index; return only hashes and faults."""
    reading = _threaded(
        lambda at: _use(samples[at], lambda image: use(at, image)),
        range(len(samples)),
    )
    return list(progress.track(reading, len(samples), "checking images"))


def decode_all(images: Iterable[ImageLike], pixel_format: PixelFormat) -> Iterator[DecodedImage]:
    """Decode files and in-memory images in order, a few in advance.

    An unreadable file is a fault; an invalid array or tensor is the caller's mistake, and raises an error.
    """

    def work(numbered: tuple[int, ImageLike]) -> DecodedImage:
        number, image = numbered
        if not isinstance(image, str | Path):
            return DecodedImage(f"image {number}", pixel_format.encode(decode(image)), "")
        try:
            return DecodedImage(str(image), pixel_format.encode(decode(read_file(Path(image)))), "")
        except (BadImageError, OSError) as error:
            return DecodedImage(str(image), None, fault_of(error))

    return _threaded(work, enumerate(images))


def hash_of(content: Content) -> str:
    """Return the sha256 of a file, or of pixels and their shape."""
    if isinstance(content, bytes):
        return sha256(content).hexdigest()
    return sha256(str(content.shape).encode() + np.ascontiguousarray(content).tobytes()).hexdigest()


def _loaded(pixels: Tensor, found: list[HashAndFault], cache: caches.Cache | None = None) -> Loaded:
    return Loaded(pixels, [hashed for hashed, _ in found], [fault for _, fault in found], cache)


def _fill(
    samples: Sequence[Sample], pixel_format: PixelFormat, pixels: Tensor, places: Iterable[int]
) -> Iterator[HashAndFault]:
    """Load the samples at ``places`` into the same rows of ``pixels``; yield the hash and fault of each."""

    def place(at: int) -> HashAndFault:
        return _use(samples[at], lambda image: pixels[at].copy_(pixel_format.encode(image)))

    return _threaded(place, places)


def _use(sample: Sample, use: Callable[[Image.Image], object]) -> HashAndFault:
    """Decode a sample and pass it to ``use``; return its hash and fault."""
    try:
        content = sample.content()
        use(decode(content))
    except (BadImageError, OSError) as error:
        return "", fault_of(error)
    return hash_of(content), ""


def _threaded(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``work(item)`` in order, computed in threads; Pillow releases the GIL while decoding."""
    pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1), thread_name_prefix="reading")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, do not wait for the remaining images


def _stamp(sample: Sample) -> str:
    """Return a string that changes with a sample: size and time of its file, or a hash of its content."""
    path = _file(sample.read)
    try:
        if path is None:
            return hash_of(sample.content())
        about = path.stat()
    except (OSError, BadImageError) as error:
        return f"unreadable: {error}"
    return f"{about.st_size} bytes, {about.st_mtime_ns}"


def _are_settled_files(samples: Sequence[Sample]) -> bool:
    """Return True if all samples are files old enough that any further change alters their timestamp."""
    paths = [_file(sample.read) for sample in samples]
    try:
        newest = max((path.stat().st_mtime for path in paths if path is not None), default=0.0)
    except OSError:
        return False
    return bool(paths) and None not in paths and newest < time.time() - _SETTLED


def _file(read: Callable[[], object]) -> Path | None:
    """Return the file of a sample if it is read by ``path.read_bytes``, else None."""
    owner = getattr(read, "__self__", None)
    return owner if isinstance(owner, Path) and read.__name__ == "read_bytes" else None
