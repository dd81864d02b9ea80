"""One tensor of the result after the other, made of what the models have, a span at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cofima.merging.recipe import FISHER, TASK_ARITHMETIC, TIES, Recipe
from cofima.progress import Progress
from cofima.weights.arithmetic import magnitudes, task_arithmetic, threshold, ties
from cofima.weights.average import average, fisher_average
from cofima.weights.average_all import average_all, fisher_average_all
from cofima.weights.pieces import Scratch

SPAN = 2**17  # elements worked on at a time: what is held beside the mapped files
LONGER = 4  # times as many where nothing but the result is held
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Part:
    """A tensor of the result, and what it is made of.

    Attributes:
        name: For messages.
        holders: Which models have it, by their place in the recipe.
        values: What each of them has.
        out: Where the result goes, of the same shape.
        base: The common start, where it has this tensor.
        fishers: The Fisher information of each value, where there is any.
        rows: If given, ``out`` is only worked on, and its rows belong to these rows of ``target``.
        target: The tensor that ``rows`` counts in.
        put: Writes flat values from an element on, where that is better than to assign to ``out``.
        by: Merged as the recipe says, summed, or copied from the last model.
    """

    name: str
    holders: Sequence[int]
    values: Sequence[Tensor]
    out: Tensor
    base: Tensor | None = None
    fishers: Sequence[Tensor] | None = None
    rows: Tensor | None = None
    target: Tensor | None = None
    by: Literal["recipe", "sum", "last"] = "recipe"
    put: Callable[[int, Tensor], None] | None = None

    @property
    def vectors(self) -> bool:
        """Tell whether there are task vectors."""
        return self.base is not None and self.by == "recipe" and self.out.is_floating_point()

    def cut(self, at: slice, scratch: Scratch) -> "Part":
        """Return a span of it, in the type of the result; on scratch memory, if it is to be put."""

        def span(value: Tensor) -> Tensor:
            return value.reshape(-1)[at]

        return Part(
            self.name,
            self.holders,
            [span(value).to(self.out.dtype) for value in self.values],
            span(self.out) if self.put is None else scratch.like(span(self.out)),
            None if self.base is None else span(self.base).to(self.out.dtype),
            None if self.fishers is None else [span(fisher) for fisher in self.fishers],
            by=self.by,
        )


def spans(part: Part, size: int, scratch: Scratch) -> Iterator[tuple[int, Part]]:
    """Cut a part into what is worked on at a time, each with the place where it begins."""
    for start in range(0, part.out.numel(), size):
        yield start, part.cut(slice(start, start + size), scratch)


@torch.no_grad()
def merge_parts(parts: Sequence[Part], recipe: Recipe, progress: Progress) -> None:
    """Fill every part's ``out``; the bar counts megabytes of the result."""
    kept = _thresholds(parts, recipe, progress) if recipe.method is TIES else []
    size = sum(part.out.nbytes for part in parts)
    pair = recipe.lam is not None and recipe.method not in (TASK_ARITHMETIC, TIES)
    length, scratch = SPAN * LONGER if pair else SPAN, Scratch()

    def work() -> Iterator[int]:
        for part in parts:
            for start, span in spans(part, length, scratch):
                _merge(span, recipe, kept)
                if part.put is not None:
                    part.put(start, span.out)
                yield span.out.nbytes
            if part.rows is not None and part.target is not None:
                part.target[part.rows] = part.out

    _follow(work(), size, "merging, MB", progress)


def _merge(span: Part, recipe: Recipe, kept: Sequence[float]) -> None:
    """Fill one span."""
    name, out, values = span.name, span.out, span.values
    if span.by == "sum":
        out.copy_(torch.stack([value.double() for value in values]).sum(0))
    elif span.by == "last" or not out.is_floating_point():
        out.copy_(values[-1] if values or span.base is None else span.base)
    elif span.base is not None and recipe.method in (TASK_ARITHMETIC, TIES):
        weights = [recipe.weights[k] for k in span.holders]
        if recipe.method is TASK_ARITHMETIC:
            out.copy_(task_arithmetic(span.base, values, weights))
        else:
            least, lam = [kept[k] for k in span.holders], 1.0 if recipe.lam is None else recipe.lam
            out.copy_(ties(span.base, values, least, weights, lam))
    elif len(values) == 1:
        out.copy_(values[0])
    else:
        _average(span, recipe, [{name: value} for value in values])


def _average(span: Part, recipe: Recipe, models: list[dict[str, Tensor]]) -> None:
    name, out = span.name, span.out
    fishers = [{name: fisher} for fisher in span.fishers or ()]
    if recipe.method in (TASK_ARITHMETIC, TIES):  # what the base does not have has no task vector
        out.copy_(average_all(models)[name])
    elif recipe.lam is None:
        weights = [recipe.weights[k] for k in span.holders]
        weights = weights if sum(weights) > 0 else [1.0] * len(weights)
        every = fisher_average_all(models, fishers, weights) if fishers else average_all(models, weights)
        out.copy_(every[name])
    elif recipe.method is FISHER and fishers:
        old, new = models
        fisher_average(old, new, fishers[0], fishers[1], recipe.lam, out={name: out})
    else:
        old, new = models
        average(old, new, recipe.lam, out={name: out})


def _thresholds(parts: Sequence[Part], recipe: Recipe, progress: Progress) -> list[float]:
    """Return from which magnitude on each model's task vector is kept, over all its tensors."""

    def least(model: int) -> float:
        mine = [part for part in parts if part.vectors and model in part.holders]
        count = sum(-(-part.out.numel() // SPAN) for part in mine)

        def vectors() -> Iterator[Tensor]:
            every = (span for part in mine for _, span in spans(part, SPAN, Scratch()))
            for span in progress.track(every, count, f"trimming model {model + 1}"):
                assert span.base is not None
                yield magnitudes(span.base, span.values[list(span.holders).index(model)])

        return threshold(vectors, sum(part.out.numel() for part in mine), recipe.density)

    return [least(model) for model in range(len(recipe.weights))]


def _follow(work: Iterable[int], size: int, label: str, progress: Progress) -> None:
    """Do the work, and announce each megabyte of it."""

    def megabytes() -> Iterator[None]:
        done = told = 0
        for amount in work:
            done += amount
            while told < done // MEGABYTE:
                told += 1
                yield
        yield

    for _ in progress.track(megabytes(), size // MEGABYTE + 1, label):
        pass
