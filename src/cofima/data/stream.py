"""Streams of tasks: a dataset split into tasks, each with new classes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from cofima.core.errors import CofimaError, did_you_mean, problems
from cofima.data.image_set import ImageSet, join
from cofima.data.splits import choose_images, share_of


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images of named classes, split into training and test set.

    Attributes:
        flip: True if mirroring an image does not change its class.
        crop: Minimum share of the area that a random training crop keeps; 1.0 disables random crops.
        facts: Metadata for a result file; JSON-serializable.
    """

    name: str
    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    flip: bool
    crop: float
    facts: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Task:
    """Task: classes that arrive together; labels number all classes in order of arrival.

    A task may instead have more images of ``known`` classes; then its ``classes`` are empty.
    """

    index: int
    classes: range
    names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    known: tuple[int, ...] = ()

    @property
    def taught(self) -> int:
        """Number of classes with images in this task."""
        return len(self.classes) or len(self.known)


@dataclass(frozen=True, eq=False)
class Stream(Sequence[Task]):
    """Sequence of tasks in order of arrival; in a slice, tasks keep their index and class ids."""

    tasks: tuple[Task, ...]
    dataset_name: str
    class_names: tuple[str, ...]  # by class id, up to the last class of the last task
    flip: bool
    crop: float
    facts: dict[str, Any]

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> "Stream": ...
    def __getitem__(self, place: int | slice) -> "Task | Stream":
        if not isinstance(place, slice):
            return self.tasks[place]
        if place.step not in (None, 1):
            raise ValueError("tasks arrive one after the other: a stream has no slices with a step")
        tasks = self.tasks[place]
        known = tasks[-1].classes.stop if tasks else 0
        return replace(self, tasks=tasks, class_names=self.class_names[:known])

    def merged(self) -> "Stream":
        """Return a stream of one task with the classes of all tasks and the same ids, for joint training."""
        classes = range(self.tasks[0].classes.start, self.tasks[-1].classes.stop)
        train, test = join([task.train for task in self]), join([task.test for task in self])
        names = self.class_names[classes.start : classes.stop]
        return replace(self, tasks=(Task(0, classes, names, train, test),))

    def held_out(self, share: float, seed: int) -> "Stream":
        """Return a stream that is tested on a held-out ``share`` of the training images, for model selection.

        The original test images are not part of it. A class with a single image keeps it for training.
        """

        def cut(task: Task) -> Task:
            chosen = choose_images(task.train, lambda count: share_of(count, share), seed)
            return replace(task, train=task.train.select(~chosen), test=task.train.select(chosen))

        return self._changed(cut, val_fraction=share, val_fraction_seed=seed)

    def limited(self, part: Literal["train", "test"], per_class: int, seed: int) -> "Stream":
        """Return the stream with at most ``per_class`` images per class in the training or test part."""

        def cut(task: Task) -> Task:
            images: ImageSet = getattr(task, part)
            kept: Any = images.select(choose_images(images, lambda _: per_class, seed))
            return replace(task, **{part: kept})

        return self._changed(cut, **{f"max_{part}_per_class": per_class, f"max_{part}_per_class_seed": seed})

    def _changed(self, change: Callable[[Task], Task], **facts: float) -> "Stream":
        return replace(self, tasks=tuple(map(change, self)), facts=self.facts | facts)


def class_order(n: int, seed: int | None) -> list[int]:
    """Return the order in which ``n`` classes arrive; ``None`` keeps the original order.

    This is the order of ``np.random.seed(seed); np.random.permutation(n)``, as used for published results.
    """
    return list(range(n)) if seed is None else np.random.RandomState(seed).permutation(n).tolist()


def increments(n: int, first: int, increment: int) -> list[int]:
    """Return the number of classes per task; the last task has the remainder."""
    if first > n:
        raise CofimaError(f"base_classes = {first}: there are only {n} classes")
    stops = [*range(first, n, increment), n]
    return [stop - start for start, stop in pairwise([0, *stops])]


def split(dataset: Dataset, first: int, increment: int, order_seed: int | None) -> Stream:
    """Split a dataset into tasks of ``first``, then ``increment`` classes each, in the order of the seed."""
    count = len(dataset.class_names)
    order = class_order(count, order_seed)
    stops = accumulate(increments(count, first, increment), initial=0)
    return _stream(dataset, [order[start:stop] for start, stop in pairwise(stops)])


def from_groups(dataset: Dataset, groups: Sequence[Sequence[int | str]]) -> Stream:
    """Split a dataset into one task per group of classes, given by index or name; others are left out."""
    names = dataset.class_names
    number = {name: index for index, name in enumerate(names)}
    found = [] if groups else ["there is no group"]
    seen: dict[int, int] = {}
    dealt: list[list[int]] = []
    for task, group in enumerate(groups, start=1):
        dealt.append([])
        if not group:
            found.append(f"group {task} is empty")
        for class_ in group:
            index = number.get(class_) if isinstance(class_, str) else class_
            if index is None or not 0 <= index < len(names):
                found.append(f"group {task}: {_unknown(class_, names)}")
            elif index in seen:
                found.append(f"group {task}: class '{names[index]}' is already in group {seen[index]}")
            else:
                seen[index] = task
                dealt[-1].append(index)
    if found:
        raise problems("the list of class groups", found)
    return _stream(dataset, dealt)


def _unknown(class_: int | str, names: tuple[str, ...]) -> str:
    if isinstance(class_, int):
        return f"no class has the index {class_}; they run from 0 to {len(names) - 1}"
    near = names if len(names) <= 20 else get_close_matches(class_, names)
    return f"unknown class '{class_}'{did_you_mean(class_, near)}"


def _stream(dataset: Dataset, groups: list[list[int]]) -> Stream:
    order = [class_ for group in groups for class_ in group]
    arrival = torch.full((len(dataset.class_names),), -1)
    arrival[torch.tensor(order)] = torch.arange(len(order))
    names = tuple(dataset.class_names[class_] for class_ in order)
    train, test = (replace(half, labels=arrival[half.labels]) for half in (dataset.train, dataset.test))

    def task(index: int, classes: range) -> Task:
        mine = names[classes.start : classes.stop]
        return Task(
            index, classes, mine, train.select(_among(train, classes)), test.select(_among(test, classes))
        )

    stops = accumulate(map(len, groups), initial=0)
    tasks = tuple(task(index, range(*ends)) for index, ends in enumerate(pairwise(stops)))
    return Stream(tasks, dataset.name, names, dataset.flip, dataset.crop, dataset.facts)


def _among(images: ImageSet, classes: range) -> Tensor:
    return (images.labels >= classes.start) & (images.labels < classes.stop)
