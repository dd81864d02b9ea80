"""What methods keep beside the network, merged: raw heads, Gaussians, Fisher information, the start."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cofima.merging.heads import Rows
from cofima.merging.parts import Part
from cofima.merging.sources import Source
from cofima.methods.state import untagged
from cofima.parts.gaussians import pool_rows
from cofima.weights.mapped import Kind, MappedFile, kind_of

HEAD = ("weight", "bias")


@dataclass(frozen=True)
class States:
    """The states of the models that have one, and what the result keeps of them.

    Attributes:
        sources: Every model folder, the base first if it is one.
        tasks: Of the result.
        parts: Which kinds of state the result keeps.
    """

    sources: Sequence[Source]
    tasks: Sequence[Sequence[str]]
    parts: frozenset[str]

    @property
    def rows(self) -> Rows:
        """Every source counts the same here, the base too."""
        return Rows([source.classes for source in self.sources])

    def kinds(self) -> dict[str, Kind]:
        """Return types and shapes of the result's state."""
        classes, last, found = len(self.rows.union), self.sources[-1].state, {}
        for key, value in last.items():
            if key.startswith("raw_head.") and "raw_head" in self.parts:
                found[key] = Kind(value.dtype, (classes, *value.shape[1:]))
            elif key.startswith(("fisher.backbone.", "start.")) and key.partition(".")[0] in self.parts:
                found[key] = kind_of(value)
            elif key.startswith("gaussians.") and "gaussians" in self.parts:
                found[key] = Kind(value.dtype, (classes, *value.shape[1:]))
        if "fisher" in self.parts:
            for key in HEAD:
                like = last[f"fisher.head.blocks.0.{key}"]
                for block, task in enumerate(self.tasks):
                    name = f"fisher.head.blocks.{block}.{key}"
                    found[name] = Kind(like.dtype, (len(task), *like.shape[1:]))
        return found

    def merge_parts(self, out: MappedFile) -> Iterator[Part]:
        """Yield what is summed (Fisher information of the backbone) or copied (the start)."""
        for key, target in out.items():
            values = [source.state[key] for source in self.sources if key in source.state]
            every = range(len(values))
            if key.startswith("fisher.backbone."):
                yield Part(key, every, values, target, by="sum", put=partial(out.put, key))
            elif key.startswith("start."):
                yield Part(key, every, values, target, by="last", put=partial(out.put, key))

    def fill(self, out: Mapping[str, Tensor]) -> None:
        """Write what has one row a class and is not merged as weights: Gaussians, Fisher of the heads."""
        if "gaussians" in self.parts:
            self._fill_gaussians(out)
        if "fisher" in self.parts:
            self._fill_head_fisher(out)

    def _fill_gaussians(self, out: Mapping[str, Tensor]) -> None:
        for row, name in enumerate(self.rows.union):
            known = [_row(source, name) for source in self.sources if name in source.classes]
            for key, value in (pool_rows(known) if len(known) > 1 else known[0]).items():
                out[f"gaussians.{key}"][row] = value

    def _fill_head_fisher(self, out: Mapping[str, Tensor]) -> None:
        """Sum the Fisher information of the heads class by class, and cut it into the result's blocks."""
        place = {name: row for row, name in enumerate(self.rows.union)}
        spans = [slice(*ends) for ends in pairwise(accumulate(map(len, self.tasks), initial=0))]
        for key in HEAD:
            like = out[f"fisher.head.blocks.0.{key}"]
            total = torch.zeros(len(place), *like.shape[1:], dtype=torch.float64)
            for source in self.sources:
                blocks = range(len(source.kept["tasks"]))
                flat = torch.cat([source.state[f"fisher.head.blocks.{block}.{key}"] for block in blocks])
                total[torch.tensor([place[name] for name in source.classes])] += flat.double()
            for block, span in enumerate(spans):
                out[f"fisher.head.blocks.{block}.{key}"].copy_(total[span])


def _row(source: Source, name: str) -> dict[str, Tensor]:
    """Return what a model remembers of one class."""
    row = source.classes.index(name)
    return {key: value[row] for key, value in untagged("gaussians", source.state).items()}
