"""Merge model folders: the backbones weight by weight, the heads class by class."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cofima import generations, methods, plugins, store
from cofima.errors import first_problems
from cofima.files import require_room
from cofima.generations import STATE, WEIGHTS, Record
from cofima.history import HistoryRow, now
from cofima.merging.becomes import Becomes, becomes, merged_tasks
from cofima.merging.fishers import Fishers
from cofima.merging.heads import Rows
from cofima.merging.parts import Part, merge_parts
from cofima.merging.recipe import Recipe
from cofima.merging.sources import Source, kinds_that_fit, widest
from cofima.merging.state import HEAD, States
from cofima.progress import Progress
from cofima.weights.mapped import Kind, MappedFile, create_mapped
from cofima.weights.pieces import Weights


@dataclass(frozen=True)
class FolderMerge:
    """What is merged into a model folder, checked.

    Attributes:
        models: The models of the recipe; a base that wise-ft takes from a file has no head.
        base: What task vectors start from.
    """

    models: Sequence[Source]
    base: Source | None
    fishers: Fishers | None
    recipe: Recipe

    @property
    def folders(self) -> list[Source]:
        """Everything that has classes, the base first."""
        return [source for source in (self.base, *self.models) if source is not None and source.kept]

    @property
    def rows(self) -> Rows:
        """Return whose head has which classes."""
        return Rows([model.classes for model in self.models], self.base.classes if self.base else ())

    def write(self, out: Path, progress: Progress) -> tuple[Becomes, int]:
        """Write the merged model folder; return what it goes on as, and the size of its tensors."""
        after = becomes(self.folders)
        states = States(self.folders, merged_tasks(self.folders), after.parts)
        weights, state = self._kinds(), states.kinds()
        size = sum(kind.bytes for kind in [*weights.values(), *state.values()])
        generations.refuse_place(out)
        require_room(out, size)
        progress.say(f"merging {len(self.models)} models into one of {size / 1e6:,.1f} MB: {self.recipe}")
        with (
            generations.write(out, self._record(after, states.tasks), [self._row(states.tasks)]) as aside,
            create_mapped(aside / WEIGHTS, weights, {"format": "pt"}) as net,
            create_mapped(aside / STATE, state, {"format": "pt"}) as kept,
        ):
            merge_parts([*self._parts(net, kept), *states.merge_parts(kept)], self.recipe, progress)
            states.fill(kept)
        return after, size

    def _kinds(self) -> dict[str, Kind]:
        kinds = {key: widest([m.weights[key] for m in self.models]) for key in self.models[0].weights}
        for key, value in self.folders[-1].head.items():
            kinds[self._head(key)] = Kind(value.dtype, (len(self.rows.union), *value.shape[1:]))
        return kinds

    def _head(self, key: str) -> str:
        return f"{self.folders[-1].kept['backbone']['classifier']}.{key}"

    def _parts(self, net: MappedFile, kept: MappedFile) -> Iterator[Part]:
        given = self.fishers.tensors if self.fishers else ()
        for key in self.models[0].weights:
            values = [model.weights[key] for model in self.models]
            mine = [fisher[key] for fisher in given if key in fisher] or None
            start = self.base.weights[key] if self.base else None
            yield Part(key, range(len(values)), values, net[key], start, mine, put=partial(net.put, key))
        for key in HEAD:
            rows = {m: fisher[self._head(key)] for m, fisher in enumerate(given) if self._head(key) in fisher}
            yield from self._head_parts(key, self._head(key), net, rows, raw=False)
            yield from self._head_parts(key, f"raw_head.{key}", kept, rows, raw=True)

    def _head_parts(
        self, key: str, name: str, out: Weights, fishers: Mapping[int, Tensor], *, raw: bool
    ) -> Iterator[Part]:
        """Yield the rows of the head that predicts, or of the raw one below an aligned head."""
        if name in out:
            values = {k: _head(model, key, raw) for k, model in enumerate(self.models) if model.kept}
            start = _head(self.base, key, raw) if self.base and self.base.kept else None
            yield from self.rows.parts(name, values, out[name], start, fishers)

    def _row(self, tasks: Sequence[Sequence[str]]) -> HistoryRow:
        """Return the one row of the result's history."""
        classes = [name for task in tasks for name in task]
        return HistoryRow(
            kind="merge", task=len(tasks), date=now(), classes=classes, notes=[str(self.recipe)]
        )

    def _record(self, after: Becomes, tasks: Sequence[Sequence[str]]) -> Record:
        """Return what config.json says of the result: as the last model, but for what was merged."""
        last = self.folders[-1].kept
        made = [
            {"path": str(s.path), "method": s.label, "classes": len(s.classes)}
            | ({"sha256": s.kept["files"][WEIGHTS]} if s.kept else {})
            for s in (self.base, *self.models)
            if s is not None
        ]
        return Record(
            method=store.method_facts(methods.find(after.method)),
            config=last["config"] | {"method": after.method, "options": after.options},
            backbone=last["backbone"],
            preprocess=last["preprocess"],
            data={"name": "merged", "merged": {"by": str(self.recipe), "models": made}},
            tasks=[list(task) for task in tasks],
            planned_tasks=len(tasks),
            plugins=plugins.said([after.method]),
        )


def folder_merge(
    models: Sequence[Source], base: Source | None, fishers: Fishers | None, recipe: Recipe
) -> FolderMerge:
    """Check that the folders can be merged, all differences in one error."""
    folders = [source for source in (base, *models) if source is not None and source.kept]
    wrong = [line for other in folders[1:] for line in _differences(folders[0], other)]
    names = [set(source.classes) for source in folders]
    if any(source.kept["config"]["method"] == "prototype" for source in folders):
        shared = sorted(name for name in set().union(*names) if sum(name in own for own in names) > 1)
        wrong += [
            f"class '{name}': the average of two prototypes of length 1 is shorter, unlike those of others; "
            "learn it anew from its images"
            for name in shared
        ]
    if wrong:
        raise first_problems("the models do not fit each other: the comparison", wrong)
    classifier = folders[0].kept["backbone"]["classifier"]
    models = [_without_head(model, classifier) for model in models]
    base = base and _without_head(base, classifier)
    kinds_that_fit([*models, *([base] if base else [])])
    return FolderMerge(models, base, fishers, recipe)


def _head(source: Source, key: str, raw: bool) -> Tensor:
    return source.state.get(f"raw_head.{key}", source.head[key]) if raw else source.head[key]


def _without_head(source: Source, classifier: str) -> Source:
    """Leave out the head of a plain file, whose classes have no names."""
    body = {key: value for key, value in source.weights.items() if not key.startswith(f"{classifier}.")}
    return source if source.kept else replace(source, weights=body)


def _differences(a: Source, b: Source) -> list[str]:
    """Return how two folders differ in what the same weights must have in common."""

    def facts(source: Source) -> dict[str, Any]:
        body, view = source.kept["backbone"], source.kept["preprocess"]
        said = {"backbone": body["name"].partition(".")[0], "final norm": body.get("final_norm")}
        said |= {key: body[key] for key in ("features", "classifier")}
        return said | {key: view[key] for key in ("size", "stored", "mean", "std")}

    mine, other = facts(a), facts(b)
    return [
        f"{key}: {mine[key]} in {a.path}, {other[key]} in {b.path}" for key in mine if mine[key] != other[key]
    ]
