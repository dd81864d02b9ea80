"""Every image of a source read once: whether it is whole, and whether it is both trained and tested on."""

from dataclasses import dataclass

from PIL import Image

from cofima.data.reading import read, readers
from cofima.data.source import Source
from cofima.progress import SILENT, Progress


@dataclass(frozen=True, eq=False)
class Contents:
    """What the images of a source hold.

    Attributes:
        train, test: The hash of each image's content, in order.
        faults: The images that cannot be read, and why.
        shared: The names of test images that are copies of a training image.
    """

    train: list[str]
    test: list[str]
    faults: list[str]
    shared: list[str]


def verify(source: Source, progress: Progress = SILENT) -> Contents:
    """Decode and hash every image."""
    pictures = [*source.train, *source.test]
    pool = readers()
    try:
        reading = pool.map(lambda picture: read(picture, _nothing), pictures)
        found = list(progress.track(reading, len(pictures), "checking images"))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, do not read the rest first
    faults = [f"{one.name}: {fault}" for one, (_, fault) in zip(pictures, found, strict=True) if fault]
    hashes = [digest for digest, _ in found]
    train, test = hashes[: len(source.train)], hashes[len(source.train) :]
    learnt = {digest for digest in train if digest}
    shared = [one.name for one, digest in zip(source.test, test, strict=True) if digest in learnt]
    return Contents(train, test, faults, shared)


def _nothing(image: Image.Image) -> None:
    """Do no more: that it could be decoded is the check."""
