"""Replay memory: a limited number of training images as uint8 pixels, and strategies to select them."""

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
    """Return an empty memory for images of the same size as ``images``."""
    return concatenate(images.select(torch.empty(0, dtype=torch.int64)))


def memory_state(memory: ImageSet) -> dict[str, Tensor]:
    """Return the memory as tensors."""
    return tagged("memory", {"pixels": memory.pixels, "labels": memory.labels})


def restore_memory(state: dict[str, Tensor]) -> ImageSet:
    """Return a memory from the result of :func:`memory_state`."""
    kept = untagged("memory", state, torch.device("cpu"))
    return image_set(kept["pixels"], kept["labels"])


@dataclass(frozen=True, eq=False)
class Concatenated(Images):
    """Concatenation of two image sets; pixels are copied only when a batch is read."""

    first: ImageSet
    second: ImageSet

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels and labels at ``index``; indices of the second set follow those of the first."""
        late = index >= len(self.first)
        pixels = self.first.pixels.new_empty(len(index), *self.first.pixels.shape[1:])
        labels = torch.empty(len(index), dtype=torch.int64)
        pixels[~late], labels[~late] = self.first.batch(index[~late])
        pixels[late], labels[late] = self.second.batch(index[late] - len(self.first))
        return pixels, labels


def hold_out(
    memory: ImageSet, images: ImageSet, share: float, generator: torch.Generator
) -> tuple[Concatenated, Concatenated]:
    """Split both sets; return the training images and the held-out images.

    The number held out per class is ``share`` of the images of an old class in memory, at least one.
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
    """Return the first ``quota`` images per class of the memory, and the best per class of ``images``."""
    best = best_of_each(images.labels, quota, features, generator)
    return concatenate(memory.select(first_of_each(memory.labels, quota)), images.select(best))


def by_class(labels: Tensor) -> list[Tensor]:
    """Return the positions of the images of each class, in order of classes."""
    return [(labels == label).nonzero().flatten() for label in sorted(set(labels.tolist()))]


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """Return the positions of the first ``count`` images per class, in order of classes."""
    return torch.cat([labels.new_empty(0), *(mine[:count] for mine in by_class(labels))])


def held_out(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return a mask that is true for ``count`` random images per class.

    All classes give the same number, limited so that each keeps at least one image. A class with a single
    image gives none.
    """
    several = [mine for mine in by_class(labels) if len(mine) > 1]
    count = min([count, *(len(mine) - 1 for mine in several)])
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for mine in several:
        chosen[mine[torch.randperm(len(mine), generator=generator)[:count]]] = True
    return chosen


def herding(features: Tensor, count: int) -> Tensor:
    """Return the positions of ``count`` images whose mean feature is close to that of all, best first.

    Greedy, as in iCaRL (Rebuffi et al., CVPR 2017): each next image brings the mean of the selected features
    as close as possible to the mean of all. Features are normalized to unit length. Any prefix of the result
    is the selection for a smaller count.
    """
    points = normalize(features.double(), dim=1)
    mean, total = points.mean(0), torch.zeros(points.shape[1], dtype=torch.float64)
    free = torch.zeros(len(points), dtype=torch.float64)
    squares = points.square().sum(1) / 2  # all 1/2, except for zero features
    chosen: list[int] = []
    for number in range(1, min(count, len(points)) + 1):
        # |number * mean - total - point|^2 is smallest where this is largest
        best = int((points @ (number * mean - total) - squares + free).argmax())
        chosen.append(best)
        free[best] = -torch.inf
        total += points[best]
    return torch.tensor(chosen, dtype=torch.int64)


def greedy_balanced(labels: Tensor, held: int, size: int, generator: torch.Generator) -> Tensor:
    """Return the positions kept after the images beyond the first ``held`` arrived one by one.

    GDumb's sampler: an image is stored if its class has fewer than its share of ``size``; if the memory is
    full, it replaces a random image of the largest class. A full memory also accepts an image that makes it
    more balanced, which the share alone, being rounded down, would reject if several classes arrive at once.
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
    """Return the positions of ``count`` images per class, by herding or, without features, at random."""
    if features is None:
        order = torch.randperm(len(labels), generator=generator)
        return order[first_of_each(labels[order], count)]
    return torch.cat([mine[herding(features[mine], count)] for mine in by_class(labels)])


@dataclass(frozen=True)
class Replayed:
    """Images drawn from a memory for one step, or this process's shard of them.

    ``weight`` scales a mean over images, and ``known_weight`` a mean over all their known logits, so that
    the average over processes is the mean over all images drawn. Both are 1 in a single process.
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

    ``known`` is the number of classes that had logits when an image was stored; further columns are 0.
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
        """Add images of the stream; the n-th goes to a random slot of 0..n-1 if the memory has that slot."""
        number = torch.arange(self.seen, self.seen + len(labels))
        drawn = torch.rand(len(labels), generator=generator, dtype=torch.float64) * (number + 1)
        places = torch.where(number < self.size, number, drawn.long()).tolist()
        last = {place: at for at, place in enumerate(places) if place < self.size}  # later images win
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
        """Add a batch, given the pixels, labels and logits of this process's shard."""
        pixels, labels, logits = (batch.gather(rows) for rows in part)
        self.add(pixels, labels, logits, generator)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return pixels, labels, logits and known of ``count`` images (or all), without replacement."""
        at = torch.randperm(len(self), generator=generator)[:count]
        return self.pixels[at], self.labels[at], self.logits[at], self.known[at]

    def replay(self, batch: distributed.Shard, generator: torch.Generator, device: torch.device) -> Replayed:
        """Draw as many images as the batch has, the same in all processes; return this process's shard."""
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
        """Return a memory from the result of :meth:`state`."""
        made, kept = cls(size), untagged("memory", state, torch.device("cpu"))
        made.seen = int(kept.pop("seen"))
        made.pixels = torch.empty(size, *kept["pixels"].shape[1:], dtype=torch.uint8)
        made.logits = torch.zeros(size, kept["logits"].shape[1])
        for name, values in kept.items():
            getattr(made, name)[: len(made)] = values
        return made
