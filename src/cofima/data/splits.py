"""Splits: a random choice of images within each class, and the name and hash that identify a split."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

from cofima.data.image_set import ImageSet
from cofima.data.options import DataOptions

Label = TypeVar("Label", bound=Hashable)
Named = Iterable[tuple[str, int]]  # the name and the label of each image


def shuffled(keys: Sequence[str], seed: int) -> list[int]:
    """Return the positions of ``keys`` in an order given by ``seed`` and the keys alone.

    Each key's rank is a hash, so the order is the same on every machine and library version, does not
    depend on the order in which the keys are found, and one more key does not reshuffle the others.
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
    """Choose ``how_many`` images of each class, given their number; return for each whether it is chosen.

    The choice depends on the seed and on the ``keys``, which name an image on every machine. Only those that
    are ``eligible`` are chosen, though all count.
    """
    chosen = [False] * len(keys)
    for places in _by_label(labels).values():
        among = [place for place in places if eligible is None or eligible[place]]
        for rank in shuffled([keys[place] for place in among], seed)[: how_many(len(places))]:
            chosen[among[rank]] = True
    return chosen


def choose_share(keys: Sequence[str], labels: Sequence[int], share: float, seed: int) -> list[bool]:
    """Choose ``share`` of all images, of each class in proportion; return for each whether it is chosen.

    Rounding class by class (:func:`choose_per_class` with :func:`share_of`) misses the share of the whole by
    an image or two; here the classes give as many images as :func:`apportion` says.
    """
    by_label = _by_label(labels)
    numbers = apportion({label: len(places) for label, places in by_label.items()}, share)
    chosen = [False] * len(keys)
    for label, places in by_label.items():
        for rank in shuffled([keys[place] for place in places], seed)[: numbers[label]]:
            chosen[places[rank]] = True
    return chosen


def apportion(counts: Mapping[int, int], share: float) -> dict[int, int]:
    """Divide ``share`` of all images among the classes, by the largest remainders.

    Each class gives the whole part of its share, but at least one, and at least one is left; then those with
    the largest remainder give one more, in the order of their labels where remainders are equal, until the
    sum is the share of the whole, rounded.
    """
    exact = Fraction(str(share))  # 1/5, where the float is only near it: remainders must tie where they do
    numbers = {label: max(1, min(n - 1, int(exact * n))) if n > 1 else 0 for label, n in counts.items()}
    lacking = round(exact * sum(counts.values())) - sum(numbers.values())
    able = [label for label in sorted(counts) if numbers[label] < counts[label] - 1]
    able.sort(key=lambda label: numbers[label] - exact * counts[label])
    for label in able[: max(0, lacking)]:
        numbers[label] += 1
    return numbers


def _by_label(labels: Sequence[Label]) -> dict[Label, list[int]]:
    """Return the places of each label, in the order in which labels are first met."""
    found: dict[Label, list[int]] = {}
    for place, label in enumerate(labels):
        found.setdefault(label, []).append(place)
    return found


def every_other(labels: Tensor, among: Tensor) -> Tensor:
    """Return a mask of the second, fourth, ... image of each class among those of a mask."""
    found = torch.zeros_like(among)
    for label in torch.unique(labels):
        found[(among & (labels == label)).nonzero().flatten()[1::2]] = True
    return found


def choose_images(images: ImageSet, how_many: Callable[[int], int], seed: int) -> Tensor:
    """Return a mask of images chosen by chance within each class.

    It depends on the seed and on where the images are stored alone: not on the order of the classes.
    """
    keys = [str(row) for row in images.rows.tolist()]
    return torch.tensor(choose_per_class(keys, images.labels.tolist(), how_many, seed), dtype=torch.bool)


def share_of(count: int, share: float) -> int:
    """Return ``share`` of ``count``, rounded: at least one, and at least one is left."""
    return max(1, min(count - 1, round(share * count))) if count > 1 else 0


def by_row(images: ImageSet) -> Named:
    """Name images that have no names by where they are stored."""
    return ((str(row), label) for row, label in images.rows_and_labels())


def split_hash(train: Named, test: Named) -> str:
    """Return a hash of which images, in which order and with which labels, are trained and tested on."""
    digest = sha256()
    for part, images in (("train", train), ("test", test)):
        for name, label in images:
            digest.update(f"{part}\t{label}\t{name}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def split_facts(split_id: str, train: Named, test: Named) -> dict[str, str]:
    """Return the entries of a result file that identify a split."""
    return {"split_id": split_id, "split_hash": split_hash(train, test)}


def seeded_name(options: DataOptions) -> str:
    """Name a split that the seed and the share of test images decide."""
    share = "" if options.test_fraction == 0.2 else f"-share{options.test_fraction:g}"
    return f"seed{options.split_seed}{share}"


def seeded_facts(options: DataOptions) -> dict[str, str | int]:
    """Return the entries of a result file that describe such a split."""
    return {"split": f"per class, {options.test_fraction:g} tested", "split_seed": options.split_seed}
