"""Fashion-MNIST: 28 x 28 grayscale images of ten kinds of clothes, in the idx format of MNIST."""

import gzip
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cofima.core.errors import problems
from cofima.data.download import RemoteFile
from cofima.data.loading.loader import Sample
from cofima.data.sources.base import Copy, DatasetInfo, Download, Source, folders_named, numbered_samples

PLACE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FILES = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
INFO = DatasetInfo(
    name="fashion_mnist",
    title="Fashion-MNIST",
    classes=10,
    variants={"official": (60_000, 10_000)},
    layouts={
        "idx": "FashionMNIST/raw/ (or fashion-mnist/) with train-images-idx3-ubyte, train-labels-idx1-ubyte, "
        "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each as it is or as .gz",
    },
    url="https://github.com/zalandoresearch/fashion-mnist, or Debian's package dataset-fashion-mnist",
    download=Download(
        "fashion-mnist",
        tuple(
            RemoteFile(name, f"{PLACE}/{name}", f"md5:{digest}", "torchvision/datasets/mnist.py")
            for name, digest in FILES.items()
        ),
    ),
)
FOLDERS = ("fashion-mnist", "fashion")
NAMES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
STEMS = {"train": "train", "test": "t10k"}


def find_copies(root: Path) -> Iterator[Copy]:
    """Yield the copies below a folder, without opening them."""
    for folder in folders_named(root, FOLDERS):
        for place in (folder, folder / "raw"):
            if all(_file(place, stem, kind) for stem in STEMS.values() for kind in ("images", "labels")):
                yield Copy("idx", place, partial(_open, place))


def _open(folder: Path) -> Source:
    found: list[str] = []
    parts = tuple(_part(folder, part, stem, found) for part, stem in STEMS.items())
    if found:
        raise problems(f"fashion_mnist in {folder}", found)
    return INFO.source((parts[0], parts[1]), NAMES)


def _part(folder: Path, part: str, stem: str, found: list[str]) -> list[Sample]:
    images, labels = (_array(_file(folder, stem, kind), kind, found) for kind in ("images", "labels"))
    if images is None or labels is None:
        return []
    if len(images) != len(labels):
        found.append(f"{stem}: {len(images)} images, but {len(labels)} labels")
    if len(labels) and labels.max() >= len(NAMES):
        found.append(f"{stem}: label {labels.max()}; they run from 0 to {len(NAMES) - 1}")
    return numbered_samples(part, labels.tolist(), lambda n: np.repeat(images[n, :, :, None], 3, axis=2))


def _file(folder: Path, stem: str, kind: str) -> Path | None:
    name = f"{stem}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _array(file: Path | None, kind: str, found: list[str]) -> NDArray[np.uint8] | None:
    """Read an idx file: two zero bytes, 8 for the type uint8, number of axes, their lengths, values."""
    assert file is not None
    axes = 3 if kind == "images" else 1
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        start, *shape = struct.unpack_from(f">{1 + axes}I", content)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        found.append(f"{file.name}: damaged or not complete ({error})")
        return None
    values = np.frombuffer(content, np.uint8, offset=4 * (1 + axes))
    if start != 0x800 + axes:
        found.append(f"{file.name}: starts with {start:#x}, not {0x800 + axes:#x}: not an idx file of {kind}")
    elif values.size != np.prod(shape):
        found.append(f"{file.name}: {values.size:,} bytes after the header, expected {np.prod(shape):,}")
    else:
        return values.reshape(shape)
    return None
