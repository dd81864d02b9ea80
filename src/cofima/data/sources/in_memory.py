"""In-memory datasets: scikit-learn's scanned digits, and generated blobs."""

import colorsys
import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from cofima.core.seeds import Seeds
from cofima.data.image_set import ImageSet
from cofima.data.loading.loader import Sample
from cofima.data.options import DataOptions
from cofima.data.sources.base import Source
from cofima.data.splits import by_row, choose_images, seeded_facts, seeded_name, share_of, split_facts
from cofima.data.stream import Dataset

NAMES = {
    "blobs": "6 classes of generated colored blobs, for a quick trial",
    "digits": "1,797 scanned handwritten digits of 8 x 8 pixels, 10 classes (scikit-learn)",
}
# multiples of an irrational number spread evenly over a circle, for any number of classes
_HUE, _TURN = (math.sqrt(5) - 1) / 2, math.sqrt(2)


def load(name: str, side: int, options: DataOptions) -> Dataset:
    """Return a dataset of this module with images of ``side`` pixels."""
    return digits(side, options) if name == "digits" else blobs(side=side, seed=options.split_seed)


def digits(side: int, options: DataOptions) -> Dataset:
    """Return 1,797 digits of 8 x 8 pixels, enlarged to ``side``; a share of each class is for testing."""
    scans = torch.from_numpy(_scans())
    labels = scans[:, -1].long()
    gray = (scans[:, :-1] * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
    gray = interpolate(gray, size=(side, side), mode="bicubic", antialias=True)
    # expand makes three views of one gray channel, for a third of the memory
    images = ImageSet(gray.expand(-1, 3, -1, -1), torch.arange(len(labels)), labels)
    tested = choose_images(images, lambda count: share_of(count, options.test_fraction), options.split_seed)
    names = tuple(map(str, range(10)))
    return _dataset("digits", names, images, tested, seeded_name(options), seeded_facts(options))


def blobs(classes: int = 6, per_class: int = 20, side: int = 16, seed: int = 0) -> Dataset:
    """Return images of one colored blob on noise; the class determines its color and position.

    Each class has ``per_class`` training images and half as many test images.
    """
    each = per_class + max(1, per_class // 2)
    generator = Seeds(seed).generator("blobs")
    pixels = torch.cat([_draw(label, each, side, generator) for label in range(classes)])
    rows = torch.arange(classes * each)
    images = ImageSet(pixels, rows, torch.arange(classes).repeat_interleave(each))
    names = tuple(f"blob {label}" for label in range(classes))
    facts = {"split": "generated", "split_seed": seed}
    return _dataset("blobs", names, images, rows % each >= per_class, f"seed{seed}", facts)


def source_of(dataset: Dataset) -> Source:
    """Return an in-memory dataset as a source."""

    def samples(images: ImageSet) -> list[Sample]:
        return [
            Sample(str(row), label, partial(_pixels, images, place))
            for place, (row, label) in enumerate(images.rows_and_labels())
        ]

    variant = dataset.facts["split_id"].rpartition(":")[2]
    parts = samples(dataset.train), samples(dataset.test)
    return Source(
        dataset.name, variant, dataset.class_names, *parts, dataset.flip, dataset.crop, dataset.facts
    )


def _scans() -> NDArray[np.float64]:
    """Return scikit-learn's scans, one per row: 64 gray levels from 0 to 16, and the digit.

    They are read from its data file, since importing scikit-learn takes seconds.
    """
    package = find_spec("sklearn")
    assert package is not None  # a requirement of this package
    file = Path(next(iter(package.submodule_search_locations or ()))) / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, delimiter=",")


def _dataset(
    name: str,
    class_names: tuple[str, ...],
    images: ImageSet,
    tested: Tensor,
    variant: str,
    facts: dict[str, Any],
) -> Dataset:
    train, test = images.select(~tested), images.select(tested)
    facts = {"train": len(train), "test": len(test), **facts, "fingerprint": images.fingerprint()}
    facts |= split_facts(f"{name}:{variant}", by_row(train), by_row(test))
    return Dataset(name, class_names, train, test, flip=False, crop=1.0, facts=facts)


def _draw(label: int, count: int, side: int, generator: torch.Generator) -> Tensor:
    """Generate ``count`` images of one class: uint8 [count, 3, side, side]."""
    turn = 2 * math.pi * label * _TURN
    place = torch.tensor([math.sin(turn), math.cos(turn)]) * 0.3 + 0.5
    center = place + 0.02 * torch.randn(count, 2, generator=generator)
    steps = (torch.arange(side) + 0.5) / side
    rows, columns = ((steps - center[:, axis, None]) ** 2 for axis in (0, 1))
    blob = torch.exp(-(rows[:, :, None] + columns[:, None, :]) / (2 * 0.12**2))
    color = torch.tensor(colorsys.hsv_to_rgb(label * _HUE % 1, 1.0, 1.0)).view(1, 3, 1, 1)
    noise = 0.08 * torch.randn(count, 3, side, side, generator=generator)
    brightness = 0.25 + 0.7 * blob[:, None] * (color - 0.25) + noise
    return (255 * brightness).clamp(0, 255).round().to(torch.uint8)


def _pixels(images: ImageSet, place: int) -> NDArray[np.uint8]:
    pixels, _ = images.batch(torch.tensor([place]))
    return pixels[0].permute(1, 2, 0).contiguous().numpy()
