"""Replay memory: a limited number of training images as uint8 pixels, and their selection."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize, pad

from cofima.core import distributed
from cofima.core.errors import CofimaError
from cofima.data.image_set import Images, ImageSet, concatenate, image_set
from cofima.methods.state import Entry, tagged, untagged

MemorySize = Annotated[int, Field(ge=2)]
MEMORY = Entry(
    "memory.", inseparable="keeps images of its classes together: a single class cannot be taken out of them"
)


def check_memory_size(size: int, classes: int, each: int = 1) -> None:
    """Raise if a memory cannot hold ``each`` images of every class."""
    if size < each * classes:
        raise CofimaError(
            f"options.memory_size = {size}: too small for {classes} classes, of which each needs "
            f"{each} image(s); give at least {each * classes}"
        )


def empty_memory(images: ImageSet) -> ImageSet:
    """Return an empty memory for images of this form."""
    return concatenate(images.select(torch.empty(0, dtype=torch.int64)))


def memory_state(memory: ImageSet) -> dict[str, Tensor]:
    """Return the memory as tensors."""
    return tagged("memory", {"pixels": memory.pixels, "labels": memory.labels})


def restore_memory(state: dict[str, Tensor]) -> ImageSet:
    """Return the memory that :func:`memory_state` stored."""
    kept = untagged("memory", state, torch.device("cpu"))
    return image_set(kept["pixels"], kept["labels"])


@dataclass(frozen=True, eq=False)
class Concatenated(Images):
    """Two image sets as one; pixels are copied only when a batch is read."""

    first: ImageSet
    second: ImageSet

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels and labels at ``index``; the second set counts on after the first."""
        late = index >= len(self.first)
        pixels = self.first.pixels.new_empty(len(index), *self.first.pixels.shape[1:])
        labels = torch.empty(len(index), dtype=torch.int64)
        pixels[~late], labels[~late] = self.first.batch(index[~late])
        pixels[late], labels[late] = self.second.batch(index[late] - len(self.first))
        return pixels, labels


def hold_out(
    memory: ImageSet, images: ImageSet, share: float, generator: torch.Generator
) -> tuple[Concatenated, Concatenated]:
    """Hold images out of both sets; return what is left, and what is held out.

    ``share`` of the images kept of an old class, at least one, and as many of each other class.
    """
    count = max(1, round(share * max(memory.counts().values())))
    out = held_out(torch.cat([memory.labels, images.labels]), count, generator)
    old, new = out[: len(memory)], out[len(memory) :]
    return Concatenated(memory.select(~old), images.select(~new)), Concatenated(
        memory.select(old), images.select(new)
    )


def with_exemplars(
    memory: ImageSet, images: ImageSet, quota: int, features: Tensor | None, generator: torch.Generator
) -> ImageSet:
    """Return the first ``quota`` of each class in memory, and the best of each class in ``images``."""
    best = best_of_each(images.labels, quota, features, generator)
    return concatenate(memory.select(first_of_each(memory.labels, quota)), images.select(best))


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
    """Return the positions kept when the images after the first ``held`` arrive one by one.

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


@dataclass(frozen=True)
class Replayed:
    """Images drawn from a memory for one step: this process's shard of them.

    ``weight`` scales a mean over them, and ``known_weight`` a mean over all their known logits, so that
    the average over processes is the mean over all images drawn: both are 1 in a single process.
    """

    pixels: Tensor
    labels: Tensor
    logits: Tensor
    known: Tensor
    part: distributed.Shard
    weight: float
    known_weight: float


class Reservoir:
    """Reservoir: a uniform sample of all images seen, with their logits at that time (Vitter, 1985).

    ``known`` says how many classes had logits when an image was taken; columns beyond are 0.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self.pixels = torch.empty(0, dtype=torch.uint8)
        self.labels = torch.zeros(size, dtype=torch.int64)
        self.known = torch.zeros(size, dtype=torch.int64)
        self.logits = torch.zeros(size, 0)

    def __len__(self) -> int:
        return min(self.seen, self.size)

    def add(self, pixels: Tensor, labels: Tensor, logits: Tensor, generator: torch.Generator) -> None:
        """Add images to the stream: the n-th takes a random place of 0..n-1, if the memory has that place."""
        number = torch.arange(self.seen, self.seen + len(labels))
        drawn = torch.rand(len(labels), generator=generator, dtype=torch.float64) * (number + 1)
        places = torch.where(number < self.size, number, drawn.long()).tolist()
        last = {place: at for at, place in enumerate(places) if place < self.size}  # later ones win
        to, at = (
            torch.tensor(list(last), dtype=torch.int64),
            torch.tensor(list(last.values()), dtype=torch.int64),
        )
        if not self.seen:
            self.pixels = torch.empty(self.size, *pixels.shape[1:], dtype=torch.uint8)
        self.seen += len(labels)
        self.logits = pad(self.logits, (0, logits.shape[1] - self.logits.shape[1]))
        self.pixels[to], self.labels[to] = pixels[at].cpu(), labels.cpu()[at]
        self.logits[to], self.known[to] = logits.float().cpu()[at], logits.shape[1]

    def add_shard(self, batch: distributed.Shard, *part: Tensor, generator: torch.Generator) -> None:
        """Add a batch of which this process has a shard: its pixels, labels and logits."""
        pixels, labels, logits = (batch.gather(rows) for rows in part)
        self.add(pixels, labels, logits, generator)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return pixels, labels, logits and known of ``count`` images kept (or all), no image twice."""
        at = torch.randperm(len(self), generator=generator)[:count]
        return self.pixels[at], self.labels[at], self.logits[at], self.known[at]

    def replay(self, batch: distributed.Shard, generator: torch.Generator, device: torch.device) -> Replayed:
        """Draw as many images as the batch has, the same for all processes, and return this one's part."""
        drawn = self.draw(batch.whole, generator)
        known, part = drawn[3].double(), distributed.current_shard(len(drawn[0]))
        weight = part.weight / batch.weight
        even = weight * float(known[part.rows].mean() / known.mean())
        pixels, labels, logits, own = (kept[part.rows].to(device) for kept in drawn)
        return Replayed(pixels, labels, logits, own, part, weight, even)

    def state(self) -> dict[str, Tensor]:
        """Return the memory as tensors."""
        names = ("pixels", "labels", "logits", "known")
        kept: dict[str, Tensor] = {name: getattr(self, name)[: len(self)] for name in names}
        return tagged("memory", kept | {"seen": torch.tensor(self.seen)})

    @classmethod
    def restore(cls, size: int, state: dict[str, Tensor]) -> "Reservoir":
        """Return the memory that :meth:`state` stored."""
        made, kept = cls(size), untagged("memory", state, torch.device("cpu"))
        made.seen = int(kept.pop("seen"))
        made.pixels = torch.empty(size, *kept["pixels"].shape[1:], dtype=torch.uint8)
        made.logits = torch.zeros(size, kept["logits"].shape[1])
        for name, values in kept.items():
            getattr(made, name)[: len(made)] = values
        return made
