"""Train/test splits: stratified random selection, and the name and hash that identify a split."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

from cofima.data.image_set import ImageSet
from cofima.data.options import DataOptions

Label = TypeVar("Label", bound=Hashable)
Named = Iterable[tuple[str, int]]  # name and label of each image


def shuffled(keys: Sequence[str], seed: int) -> list[int]:
    """Return the positions of ``keys`` in an order that depends only on ``seed`` and the keys.

    Keys are sorted by a hash, so the order is the same on every machine and library version, does not
    depend on the order of ``keys``, and an additional key does not reshuffle the others.
    """
    ranks = [sha256(f"{seed}/{key}".encode("utf-8", "surrogateescape")).digest() for key in keys]
    return sorted(range(len(keys)), key=ranks.__getitem__)


def choose_per_class(
    keys: Sequence[str],
    labels: Sequence[Hashable],
    how_many: Callable[[int], int],
    seed: int,
    eligible: Sequence[bool] | None = None,
) -> list[bool]:
    """Choose ``how_many(size)`` images of each class of that size; return a mask of the chosen images.

    The choice depends only on the seed and the ``keys``, which identify an image on every machine. Only
    ``eligible`` images are chosen, though all count toward the size.
    """
    chosen = [False] * len(keys)
    for places in _by_label(labels).values():
        among = [place for place in places if eligible is None or eligible[place]]
        for rank in shuffled([keys[place] for place in among], seed)[: how_many(len(places))]:
            chosen[among[rank]] = True
    return chosen


def choose_share(keys: Sequence[str], labels: Sequence[int], share: float, seed: int) -> list[bool]:
    """Choose ``share`` of all images, stratified by class; return a mask of the chosen images.

    Rounding per class (:func:`choose_per_class` with :func:`share_of`) may miss the share of the total by an
    image or two; here the numbers per class come from :func:`apportion`.
    """
    by_label = _by_label(labels)
    numbers = apportion({label: len(places) for label, places in by_label.items()}, share)
    chosen = [False] * len(keys)
    for label, places in by_label.items():
        for rank in shuffled([keys[place] for place in places], seed)[: numbers[label]]:
            chosen[places[rank]] = True
    return chosen


def apportion(counts: Mapping[int, int], share: float) -> dict[int, int]:
    """Divide ``share`` of all images among the classes by the largest remainder method.

    Each class gives its share rounded down, but at least one image, and keeps at least one. Then the classes
    with the largest remainders give one more, ties in order of labels, until the sum is the rounded share of
    the total.
    """
    exact = Fraction(str(share))  # exactly 1/5, not the nearest float: otherwise equal remainders differ
    numbers = {label: max(1, min(n - 1, int(exact * n))) if n > 1 else 0 for label, n in counts.items()}
    lacking = round(exact * sum(counts.values())) - sum(numbers.values())
    able = [label for label in sorted(counts) if numbers[label] < counts[label] - 1]
    able.sort(key=lambda label: numbers[label] - exact * counts[label])
    for label in able[: max(0, lacking)]:
        numbers[label] += 1
    return numbers


def _by_label(labels: Sequence[Label]) -> dict[Label, list[int]]:
    """Return the positions of each label, with labels in order of first occurrence."""
    found: dict[Label, list[int]] = {}
    for place, label in enumerate(labels):
        found.setdefault(label, []).append(place)
    return found


def every_other(labels: Tensor, among: Tensor) -> Tensor:
    """Return a mask of every second image of each class among those of the mask ``among``."""
    found = torch.zeros_like(among)
    for label in torch.unique(labels):
        found[(among & (labels == label)).nonzero().flatten()[1::2]] = True
    return found


def choose_images(images: ImageSet, how_many: Callable[[int], int], seed: int) -> Tensor:
    """Return a mask of images chosen at random within each class.

    It depends only on the seed and on the rows of the images, not on the order of the classes.
    """
    keys = [str(row) for row in images.rows.tolist()]
    return torch.tensor(choose_per_class(keys, images.labels.tolist(), how_many, seed), dtype=torch.bool)


def share_of(count: int, share: float) -> int:
    """Return ``share`` of ``count``, rounded, such that both it and the rest are at least one."""
    return max(1, min(count - 1, round(share * count))) if count > 1 else 0


def by_row(images: ImageSet) -> Named:
    """Return names and labels of images without names of their own, named by their rows."""
    return ((str(row), label) for row, label in images.rows_and_labels())


def split_hash(train: Named, test: Named) -> str:
    """Return a hash of the names and labels of training and test images, in order."""
    digest = sha256()
    for part, images in (("train", train), ("test", test)):
        for name, label in images:
            digest.update(f"{part}\t{label}\t{name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def split_facts(split_id: str, train: Named, test: Named) -> dict[str, str]:
    """Return the metadata that identifies a split, for a result file."""
    return {"split_id": split_id, "split_hash": split_hash(train, test)}


def seeded_name(options: DataOptions) -> str:
    """Return the name of a split determined by the seed and the share of test images."""
    share = "" if options.test_fraction == 0.2 else f"-share{options.test_fraction:g}"
    return f"seed{options.split_seed}{share}"


def seeded_facts(options: DataOptions) -> dict[str, str | int]:
    """Return the metadata that describes a seeded split, for a result file."""
    return {"split": f"per class, {options.test_fraction:g} tested", "split_seed": options.split_seed}
