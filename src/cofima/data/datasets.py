"""Datasets by name: what there is, whether a name is right, and how it is loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate

from cofima.data.deal import choose, part
from cofima.data.images import ImageSet
from cofima.data.stream import Dataset
from cofima.data.synthetic import blobs
from cofima.errors import CofimaError, did_you_mean
from cofima.progress import SILENT, Progress


class DataOptions(BaseModel):
    """How a dataset is read and split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each class that is tested on, for data without a test part of its own."""
    split_seed: int = 0
    """Which images that share takes."""
    skip_bad: bool = False
    """Leave out unreadable images and one-sided classes instead of refusing the folder."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """At most so many training images of each class."""
    flip: bool | None = None
    """Mirror training images; as the dataset says, if not given."""
    crop: Annotated[float, Field(gt=0, le=1)] | None = None
    """Least share of the area that a random training crop keeps; as the dataset says, if not given."""
    root: Path | None = None
    """Where relative folders are looked for; the working directory, if not given."""


def _digits(side: int, options: DataOptions, progress: Progress) -> Dataset:
    scans = load_digits()
    labels = torch.from_numpy(scans.target).long()
    grey = torch.from_numpy(scans.images * (255 / 16)).round().to(torch.uint8)[:, None]
    grey = interpolate(grey, size=(side, side), mode="bicubic", antialias=True)
    # three views of one grey channel: a third of the memory
    everything = ImageSet(grey.expand(-1, 3, -1, -1), torch.arange(len(labels)), labels)
    tested = choose(everything, lambda count: part(options.test_share, count), options.split_seed)
    facts = {
        "train": int((~tested).sum()),
        "test": int(tested.sum()),
        "split": f"per class, {options.test_share:g} tested",
        "split_seed": options.split_seed,
        "fingerprint": everything.fingerprint(),
    }
    train, test = everything.select(~tested), everything.select(tested)
    return Dataset("digits", tuple(map(str, range(10))), train, test, flip=False, crop=1.0, facts=facts)


def _blobs(side: int, options: DataOptions, progress: Progress) -> Dataset:
    return blobs(side=side, seed=options.split_seed)


Loader = Callable[[int, DataOptions, Progress], Dataset]

_KNOWN: dict[str, tuple[str, Loader]] = {
    "blobs": ("6 classes of generated coloured blobs, for a quick trial", _blobs),
    "digits": ("1,797 scanned handwritten digits of 8 x 8 pixels, 10 classes (scikit-learn)", _digits),
}


def names() -> list[str]:
    """Return the names that ``load`` knows."""
    return sorted(_KNOWN)


def describe(name: str) -> str:
    """Return one line about the dataset."""
    return _KNOWN[name][0]


def check(name: str, root: Path | None = None) -> str | None:
    """Return what is wrong with the name of a dataset, or None."""
    return None if name in _KNOWN else f"unknown dataset '{name}'{did_you_mean(name, names())}"


def load(name: str, side: int, *, options: DataOptions, progress: Progress = SILENT) -> Dataset:
    """Load a dataset with every image at ``side`` x ``side`` pixels."""
    problem = check(name, options.root)
    if problem:
        raise CofimaError(problem)
    dataset = _KNOWN[name][1](side, options, progress)
    flip = dataset.flip if options.flip is None else options.flip
    crop = dataset.crop if options.crop is None else options.crop
    return replace(dataset, flip=flip, crop=crop)
