"""The images of a source, decoded once and kept in memory."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from cofima.data.images import BadImageError, ImageSet, decode, fit
from cofima.data.source import Picture, Source
from cofima.data.stream import Dataset
from cofima.errors import first_problems
from cofima.progress import SILENT, Progress

T = TypeVar("T")


def decoded(source: Source, side: int, progress: Progress = SILENT) -> Dataset:
    """Read every image at ``side`` x ``side`` pixels, or list all that cannot be read."""
    pictures = [*source.train, *source.test]
    pixels = torch.empty(len(pictures), 3, side, side, dtype=torch.uint8)

    def place(at: int) -> str:
        return read(pictures[at], lambda image: pixels[at].copy_(fit(image, side)))[1]

    faults = each(place, len(pictures), progress, "reading images")
    found = [f"{one.name}: {fault}" for one, fault in zip(pictures, faults, strict=True) if fault]
    if found:
        raise first_problems(f"{source.name} in {source.facts.get('folder', 'memory')}", found)
    labels = torch.tensor([picture.label for picture in pictures])
    images = ImageSet(pixels, torch.arange(len(pictures)), labels)
    train = torch.arange(len(pictures)) < len(source.train)
    facts = source.facts | {"fingerprint": images.fingerprint()}
    parts = images.select(train), images.select(~train)
    return Dataset(source.name, source.class_names, *parts, source.flip, source.crop, facts)


def listed(dataset: Dataset) -> Source:
    """Return images that are in memory as a source."""

    def pictures(images: ImageSet) -> list[Picture]:
        return [
            Picture(str(row), label, partial(_pixels, images, place))
            for place, (row, label) in enumerate(images.named())
        ]

    variant = dataset.facts["split_id"].rpartition(":")[2]
    parts = pictures(dataset.train), pictures(dataset.test)
    return Source(
        dataset.name, variant, dataset.class_names, *parts, dataset.flip, dataset.crop, dataset.facts
    )


def _pixels(images: ImageSet, place: int) -> NDArray[np.uint8]:
    pixels, _ = images.batch(torch.tensor([place]))
    return pixels[0].permute(1, 2, 0).contiguous().numpy()


def read(picture: Picture, use: Callable[[Image.Image], object]) -> tuple[str, str]:
    """Decode an image and use it; return the hash of its content, and what is wrong with it, if anything."""
    try:
        content = picture.read()
        use(decode(Path(picture.name), content) if isinstance(content, bytes) else Image.fromarray(content))
    except BadImageError as error:
        return "", error.reason
    except OSError as error:
        return "", (error.strerror or str(error)).lower()
    if isinstance(content, bytes):
        return sha256(content).hexdigest(), ""
    return sha256(str(content.shape).encode() + content.tobytes()).hexdigest(), ""


def each(work: Callable[[int], T], count: int, progress: Progress, label: str) -> list[T]:
    """Do some work for 0, 1, ..., count - 1 in several threads; the results are in order."""
    pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))
    try:
        return list(progress.track(pool.map(work, range(count)), count, label))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, do not read the rest first
