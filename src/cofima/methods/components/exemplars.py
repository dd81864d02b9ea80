"""Which images are worth keeping, as positions among the labels; who keeps them is not known here."""

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import normalize


def by_class(labels: Tensor) -> list[Tensor]:
    """Return the positions of each class's images, class by class."""
    return [(labels == label).nonzero().flatten() for label in sorted(set(labels.tolist()))]


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """Return the positions of the first ``count`` images of each class, class by class."""
    return torch.cat([labels.new_empty(0), *(mine[:count] for mine in by_class(labels))])


def held_out(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return a mask that is true for ``count`` images of each class, drawn by chance.

    All classes give the same number: no more than leaves each of them one image. A class with a
    single image keeps it and gives none.
    """
    several = [mine for mine in by_class(labels) if len(mine) > 1]
    count = min([count, *(len(mine) - 1 for mine in several)])
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for mine in several:
        chosen[mine[torch.randperm(len(mine), generator=generator)[:count]]] = True
    return chosen


def herding(features: Tensor, count: int) -> Tensor:
    """Return the positions of ``count`` images whose features have nearly the mean of all, best first.

    Greedy, as in iCaRL (Rebuffi et al., CVPR 2017): each next image brings the mean of those chosen as close
    as it can to the mean of all. Features are taken at unit length. Any first part of the result is
    itself the choice for a smaller count.
    """
    points = normalize(features.double(), dim=1)
    mean, total = points.mean(0), torch.zeros(points.shape[1], dtype=torch.float64)
    free = torch.zeros(len(points), dtype=torch.float64)
    squares = points.square().sum(1) / 2  # all 1/2, but for features that are 0
    chosen: list[int] = []
    for number in range(1, min(count, len(points)) + 1):
        # |number * mean - total - point|^2 is smallest where this is largest
        best = int((points @ (number * mean - total) - squares + free).argmax())
        chosen.append(best)
        free[best] = -torch.inf
        total += points[best]
    return torch.tensor(chosen, dtype=torch.int64)


def greedy_balanced(labels: Tensor, held: int, size: int, generator: torch.Generator) -> Tensor:
    """Return which images are kept when those after the first ``held`` arrive one by one.

    GDumb's sampler: an image is taken if its class has fewer than its share of ``size``; if the memory
    is full, a random image of the largest class makes room. A full memory also takes an image that
    evens it out: where several classes come at once, the share alone, rounded down, would not.
    """
    kept: defaultdict[int, list[int]] = defaultdict(list)
    for place, label in enumerate(labels.tolist()):
        mine = kept[label]
        if place >= held:
            largest, full = max(kept.values(), key=len), sum(map(len, kept.values())) >= size
            if len(mine) >= size // len(kept) and not (full and len(largest) > len(mine) + 1):
                continue
            if full:
                largest.pop(int(torch.randint(len(largest), (), generator=generator)))
        mine.append(place)
    return torch.tensor(sorted(place for places in kept.values() for place in places), dtype=torch.int64)


def best_of_each(labels: Tensor, count: int, features: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the positions of ``count`` images of each class, by herding or, without features, by chance."""
    if features is None:
        order = torch.randperm(len(labels), generator=generator)
        return order[first_of_each(labels[order], count)]
    return torch.cat([mine[herding(features[mine], count)] for mine in by_class(labels)])
