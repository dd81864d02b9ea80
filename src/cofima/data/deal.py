"""Dealing images out by chance, the same for the same seed on every machine and library version."""

from collections.abc import Callable, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from cofima.data.images import ImageSet


def shuffled(keys: Sequence[str], seed: int) -> list[int]:
    """Return the positions of ``keys`` in an order given by ``seed`` and the keys alone.

    Each key's rank is a hash, so the order in which the keys are found does not matter, and one
    more key does not reshuffle the others.
    """
    ranks = [sha256(f"{seed}/{key}".encode("utf-8", "surrogateescape")).digest() for key in keys]
    return sorted(range(len(keys)), key=ranks.__getitem__)


def part(share: float, count: int) -> int:
    """Return how many of ``count`` are ``share`` of them: at least one, and at least one is left."""
    return max(1, min(count - 1, round(share * count))) if count > 1 else 0


def choose(images: ImageSet, how_many: Callable[[int], int], seed: int) -> Tensor:
    """Return a mask that is true for ``how_many`` of the images of each class.

    It depends on the seed and on where the images are stored alone: not on the order of the classes.
    """
    chosen = torch.zeros(len(images), dtype=torch.bool)
    for label, count in images.counts().items():
        mine = (images.labels == label).nonzero().flatten()
        order = shuffled([str(row) for row in images.rows[mine].tolist()], seed)
        chosen[mine[torch.tensor(order[: how_many(count)], dtype=torch.int64)]] = True
    return chosen
