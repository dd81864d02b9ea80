"""Merging of tensors, one by one and in spans of elements, so that memory stays small."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

from cofima.classifier.merge.request import (
    BREADCRUMBS,
    DARE,
    FISHER,
    MAGMAX,
    MODEL_STOCK,
    TIES,
    MergeSettings,
)
from cofima.core.progress import Progress
from cofima.weights.average import average, average_all, fisher_average, fisher_average_all
from cofima.weights.ops import Scratch
from cofima.weights.task_vectors import (
    band,
    breadcrumbs,
    dare,
    largest_vector,
    magnitudes,
    model_stock,
    products,
    stock_share,
    task_arithmetic,
    threshold,
    ties,
)

SPAN = 2**17  # elements at a time: all that is in memory besides the mapped files
LONGER = 4  # longer spans for averages of two models, where only the result is in memory
MEGABYTE = 1_000_000
By = Literal["rule", "sum", "last"]


@dataclass(frozen=True)
class TensorMerge:
    """One tensor of the result, and the tensors that it is merged from.

    Attributes:
        name: Name of the tensor.
        holders: Indices of the models that have it.
        values: Tensors of these models.
        out: The result, of the same shape.
        base: Tensor of the base, if it has one.
        fishers: Fisher information of each value, if any.
        rows: If given, ``out`` is a buffer, whose rows are copied to these rows of ``target``.
        target: The tensor that ``rows`` indexes.
        by: How to merge: by the method of the settings (``rule``), as a sum, or as a copy of the last model.
        put: Writes flat values from a start index, instead of an assignment to ``out``.
    """

    name: str
    holders: Sequence[int]
    values: Sequence[Tensor]
    out: Tensor
    base: Tensor | None = None
    fishers: Sequence[Tensor] | None = None
    rows: Tensor | None = None
    target: Tensor | None = None
    by: By = "rule"
    put: Callable[[int, Tensor], None] | None = None

    @property
    def vectors(self) -> bool:
        """True if the tensor has task vectors."""
        return self.base is not None and self.by == "rule" and self.out.is_floating_point()

    def cut(self, at: slice, scratch: Scratch) -> "TensorMerge":
        """Return a span of the merge in the result's dtype; ``out`` is scratch memory if ``put`` is given."""

        def span(value: Tensor) -> Tensor:
            return value.reshape(-1)[at]

        return TensorMerge(
            self.name,
            self.holders,
            [span(value).to(self.out.dtype) for value in self.values],
            span(self.out) if self.put is None else scratch.like(span(self.out)),
            None if self.base is None else span(self.base).to(self.out.dtype),
            None if self.fishers is None else [span(fisher) for fisher in self.fishers],
            by=self.by,
        )


@dataclass(frozen=True)
class ClassRows:
    """Matching of tensors that have one row per class, each with its own classes in its own order.

    Attributes:
        classes: Class names of each model's rows; empty for a model without classes.
        base: Class names of the base's rows, if it has any.
    """

    classes: Sequence[Sequence[str]]
    base: Sequence[str] = ()

    @property
    def union(self) -> list[str]:
        """All classes in order of first appearance, the base first."""
        return list(dict.fromkeys(name for names in (self.base, *self.classes) for name in names))

    def merges(
        self,
        name: str,
        values: Mapping[int, Tensor],
        target: Tensor,
        names: Sequence[str],
        *,
        base: Tensor | None = None,
        fishers: Mapping[int, Tensor] | None = None,
        by: By = "rule",
    ) -> Iterator[TensorMerge]:
        """Yield one merge per set of models that share classes; only the rows of these classes are copied.

        ``names`` are the classes of the target's rows.
        """
        groups: dict[tuple[tuple[int, ...], bool], list[int]] = defaultdict(list)
        known_by, by_base = [set(mine) for mine in self.classes], set(self.base)
        for row, one in enumerate(names):
            holders = tuple(model for model, mine in enumerate(known_by) if one in mine)
            groups[holders, one in by_base].append(row)
        for (holders, known), rows in groups.items():
            some = [names[row] for row in rows]
            kept = [_rows(values[model], self.classes[model], some) for model in holders]
            start = _rows(base, self.base, some) if known and base is not None else None
            given = fishers and [_rows(fishers[model], self.classes[model], some) for model in holders]
            out = torch.empty(len(rows), *target.shape[1:], dtype=target.dtype)
            yield TensorMerge(name, holders, kept, out, start, given or None, torch.tensor(rows), target, by)


def _rows(value: Tensor, classes: Sequence[str], names: Sequence[str]) -> Tensor:
    place = {name: row for row, name in enumerate(classes)}
    return value[torch.tensor([place[name] for name in names], dtype=torch.int64)]


def spans(one: TensorMerge, size: int, scratch: Scratch) -> Iterator[tuple[int, TensorMerge]]:
    """Yield the spans of a merge, each with the index of its first element."""
    for start in range(0, one.out.numel(), size):
        yield start, one.cut(slice(start, start + size), scratch)


@torch.no_grad()
def merge_tensors(merges: Sequence[TensorMerge], settings: MergeSettings, progress: Progress) -> None:
    """Compute every ``out``; progress is in megabytes of the result."""
    kept = _thresholds(merges, settings, progress) if settings.method is TIES else []
    size = sum(one.out.nbytes for one in merges)
    pair = settings.lam is not None and not settings.rule.vectors
    length, scratch = SPAN * LONGER if pair else SPAN, Scratch()

    def work() -> Iterator[int]:
        for one in merges:
            layer = _layer(one, settings, kept)
            for start, span in spans(one, length, scratch):
                _merge(span, settings, layer)
                if one.put is not None:
                    one.put(start, span.out)
                yield span.out.nbytes
            if one.rows is not None and one.target is not None:
                one.target[one.rows] = one.out

    follow(work(), size, "merging, MB", progress)


def _merge(span: TensorMerge, settings: MergeSettings, layer: "Layer") -> None:
    """Compute one span."""
    name, out, values = span.name, span.out, span.values
    if span.by == "sum":
        out.copy_(torch.stack([value.double() for value in values]).sum(0))
    elif span.by == "last" or not out.is_floating_point():
        out.copy_(values[-1] if values or span.base is None else span.base)
    elif span.base is not None and settings.rule.vectors:
        out.copy_(_vectors(span.base, values, settings, layer, [settings.weights[k] for k in span.holders]))
    elif len(values) == 1:
        out.copy_(values[0])
    else:
        _average(span, settings, [{name: value} for value in values])


def _vectors(
    base: Tensor,
    values: Sequence[Tensor],
    settings: MergeSettings,
    layer: "Layer",
    weights: Sequence[float],
) -> Tensor:
    """Return the merge of task vectors; the base if no model has this tensor."""
    lam = 1.0 if settings.lam is None else settings.lam
    if not values:
        return base
    if settings.method is TIES:
        return ties(base, values, layer.least, weights, lam)
    if settings.method is MAGMAX:
        return largest_vector(base, values, lam)
    if settings.method is MODEL_STOCK:
        return model_stock(base, values, layer.share)
    if settings.method is BREADCRUMBS:
        return breadcrumbs(base, values, layer.bands, weights)
    if settings.method is DARE:
        kept = [torch.rand(base.shape, generator=draws) < settings.density for draws in layer.draws]
        return dare(base, values, kept, settings.density, weights)
    return task_arithmetic(base, values, weights)


@dataclass(frozen=True)
class Layer:
    """Quantities of a whole tensor's task vectors that its spans share.

    Attributes:
        least: Smallest magnitude that TIES keeps, per model.
        share: Model Stock's share of the models.
        bands: Range of magnitudes that Breadcrumbs keeps, per model.
        draws: Random generator by which DARE drops elements, per model.
    """

    least: Sequence[float] = ()
    share: float = 1.0
    bands: Sequence[tuple[float, float]] = ()
    draws: Sequence[torch.Generator] = field(default_factory=list)


def _layer(one: TensorMerge, settings: MergeSettings, kept: Sequence[float]) -> Layer:
    """Compute what the merge of each span needs to know about the whole tensor, a span at a time."""
    if not one.vectors or not one.holders:
        return Layer()
    if settings.method is TIES:
        return Layer(least=[kept[k] for k in one.holders])
    if settings.method is MODEL_STOCK:
        total = torch.zeros(len(one.holders), len(one.holders), dtype=torch.float64)
        for _, span in spans(one, SPAN, Scratch()):
            assert span.base is not None
            total += products(span.base, span.values)
        return Layer(share=stock_share(total))
    if settings.method is BREADCRUMBS:

        def sizes(place: int) -> Iterator[Tensor]:
            for _, span in spans(one, SPAN, Scratch()):
                assert span.base is not None
                yield magnitudes(span.base, span.values[place])

        count, shares = one.out.numel(), (settings.density, settings.outliers)
        return Layer(bands=[band(partial(sizes, k), count, *shares) for k in range(len(one.holders))])
    if settings.method is DARE:
        return Layer(draws=[_draws(one, settings.seed, k) for k in one.holders])
    return Layer()


def _draws(one: TensorMerge, seed: int, model: int) -> torch.Generator:
    """Return a random generator for a tensor of a model, independent of the tensors merged before it."""
    rows = [] if one.rows is None else one.rows.tolist()
    words = f"{seed} {model} {one.name} {rows}".encode()
    number = int.from_bytes(blake2b(words, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(number >> 1)


def _average(span: TensorMerge, settings: MergeSettings, models: list[dict[str, Tensor]]) -> None:
    name, out = span.name, span.out
    fishers = [{name: fisher} for fisher in span.fishers or ()]
    if settings.rule.vectors:  # the base lacks this tensor, so there is no task vector
        out.copy_(average_all(models)[name])
    elif settings.lam is None:
        weights = [settings.weights[k] for k in span.holders]
        weights = weights if sum(weights) > 0 else [1.0] * len(weights)
        every = fisher_average_all(models, fishers, weights) if fishers else average_all(models, weights)
        out.copy_(every[name])
    elif settings.method is FISHER and fishers:
        old, new = models
        fisher_average(old, new, fishers[0], fishers[1], settings.lam, out={name: out})
    else:
        old, new = models
        average(old, new, settings.lam, out={name: out})


def _thresholds(merges: Sequence[TensorMerge], settings: MergeSettings, progress: Progress) -> list[float]:
    """Return the smallest magnitude that TIES keeps of each model's task vector, over all its tensors."""

    def least(model: int) -> float:
        mine = [one for one in merges if one.vectors and model in one.holders]
        count = sum(-(-one.out.numel() // SPAN) for one in mine)

        def vectors() -> Iterator[Tensor]:
            every = (span for one in mine for _, span in spans(one, SPAN, Scratch()))
            for span in progress.track(every, count, f"trimming model {model + 1}"):
                assert span.base is not None
                yield magnitudes(span.base, span.values[list(span.holders).index(model)])

        return threshold(vectors, sum(one.out.numel() for one in mine), settings.density)

    return [least(model) for model in range(len(settings.weights))]


def follow(work: Iterable[int], size: int, label: str, progress: Progress) -> None:
    """Run ``work``, which yields sizes in bytes, with a progress bar in megabytes."""

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
