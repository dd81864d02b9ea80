"""Datasets laid out as folders: one folder per class, in ``train`` and ``test`` (or ``val``), or unsplit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cofima.data.deal import part, shuffled
from cofima.data.files import ImageFile, list_images
from cofima.data.options import DataOptions
from cofima.data.source import Picture, Source
from cofima.data.sources.base import About
from cofima.data.splits import seeded
from cofima.errors import problems

TRAIN_AND_TEST = "train/CLASS/*.jpg and test/CLASS/*.jpg (or val)"


def is_split(folder: Path) -> bool:
    """Tell whether a folder has both a training and a test part."""
    return (folder / "train").is_dir() and any((folder / test).is_dir() for test in ("test", "val"))


def split_folders(
    name: str, about: About, folder: Path, key: Callable[[str], tuple[int, str]] | None = None
) -> Source:
    """List a folder with ``train`` and ``test`` (or ``val``).

    Classes are numbered in the order of their folders' names, as in torchvision, on which published
    orders of classes rest; ``key`` orders them in another way.
    """
    found = list_images(folder)
    wrong = [*found.wrong, *found.duplicates()]
    if wrong:
        raise problems(f"{name} in {folder}", wrong)
    names = sorted(found.classes, key=key)
    parts = [[file for file in found.files if file.part == which] for which in ("train", "test")]
    return about.make(name, unique(parts, names), names)


def unique(parts: Sequence[Sequence[ImageFile]], names: Sequence[str]) -> tuple[list[Picture], list[Picture]]:
    """Name the images by their paths below the part, and with the part where both have such a path."""
    number = {name: label for label, name in enumerate(names)}
    both = {file.key for file in parts[0]} & {file.key for file in parts[1]}

    def pictures(files: Sequence[ImageFile]) -> list[Picture]:
        return [
            Picture(f"{f.part}/{f.key}" if both else f.key, number[f.class_name], f.path.read_bytes)
            for f in files
        ]

    return pictures(parts[0]), pictures(parts[1])


def deal_by_seed(source: Source, options: DataOptions) -> Source:
    """Set a share of each class aside for testing, by the seed and the images' names alone."""
    by_label: dict[int, list[Picture]] = {}
    for picture in [*source.train, *source.test]:
        by_label.setdefault(picture.label, []).append(picture)
    train: list[Picture] = []
    test: list[Picture] = []
    for mine in by_label.values():
        order = shuffled([picture.name for picture in mine], options.split_seed)
        tested = set(order[: part(options.test_share, len(mine))])
        for place, picture in enumerate(mine):
            (test if place in tested else train).append(picture)
    facts = source.facts | {
        "split": f"per class, {options.test_share:g} tested",
        "split_seed": options.split_seed,
    }
    return replace(source, variant=seeded(options), train=train, test=test, facts=facts)
