"""Heads of different classes, brought together by the classes' names."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cofima.merging.parts import Part


@dataclass(frozen=True)
class Rows:
    """Tensors with one row a class, each with its own classes in its own order.

    Attributes:
        classes: Of each model, the names of its rows; empty for a model without a head.
        base: The names of the base's rows, where it has any.
    """

    classes: Sequence[Sequence[str]]
    base: Sequence[str] = ()

    @property
    def union(self) -> list[str]:
        """All classes in order of first appearance, the base first."""
        return list(dict.fromkeys(name for names in (self.base, *self.classes) for name in names))

    def parts(
        self,
        name: str,
        values: Mapping[int, Tensor],
        target: Tensor,
        base: Tensor | None = None,
        fishers: Mapping[int, Tensor] | None = None,
        by: Literal["recipe", "sum"] = "recipe",
    ) -> Iterator[Part]:
        """Yield one part for each set of models that have classes in common; only rows are copied."""
        groups: dict[tuple[tuple[int, ...], bool], list[int]] = defaultdict(list)
        union, known_by, by_base = self.union, [set(names) for names in self.classes], set(self.base)
        for row, one in enumerate(union):
            holders = tuple(model for model, names in enumerate(known_by) if one in names)
            groups[holders, one in by_base].append(row)
        for (holders, known), rows in groups.items():
            names = [union[row] for row in rows]
            kept = [_rows(values[model], self.classes[model], names) for model in holders]
            start = _rows(base, self.base, names) if known and base is not None else None
            given = fishers and [_rows(fishers[model], self.classes[model], names) for model in holders]
            out = torch.empty(len(rows), *target.shape[1:], dtype=target.dtype)
            yield Part(name, holders, kept, out, start, given or None, torch.tensor(rows), target, by)


def _rows(value: Tensor, classes: Sequence[str], names: Sequence[str]) -> Tensor:
    place = {name: row for row, name in enumerate(classes)}
    return value[torch.tensor([place[name] for name in names], dtype=torch.int64)]
