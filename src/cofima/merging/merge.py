"""Merge checkpoints: one call for files and for model folders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cofima import methods
from cofima.errors import CofimaError, problems
from cofima.merging.files import merge_files
from cofima.merging.fishers import Fishers, open_fishers
from cofima.merging.folders import FolderMerge, folder_merge
from cofima.merging.place import out_problems
from cofima.merging.recipe import WISE_FT, Recipe, Wish
from cofima.merging.sources import Source, open_source
from cofima.progress import SILENT, Progress

T = TypeVar("T")


@dataclass(frozen=True)
class Merged:
    """What a merge came to.

    Attributes:
        path: The file or the model folder.
        bytes: Size of its tensors.
        label: The method that a merged folder goes on with; empty for a file.
        classes: What it can tell apart, in the order of the logits; empty for a file.
        notes: What the user should know.
    """

    path: Path
    bytes: int
    label: str = ""
    classes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def merge(
    models: Sequence[str | Path],
    out: str | Path,
    method: str = "average",
    *,
    lam: float | None = None,
    weights: Sequence[float] | None = None,
    fisher: Sequence[str | Path] | None = None,
    base: str | Path | None = None,
    density: float | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Merged:
    """Merge model folders, or .safetensors files, into one; tensor by tensor, straight from disk to disk.

    Memory stays small however large the models are. Folders may know different classes: their heads
    are brought together by the classes' names.

    Args:
        models: Two or more model folders or files; one is enough where there is a ``base``.
        out: The merged folder or file.
        method: ``average``, ``fisher``, ``wise-ft``, ``task-arithmetic`` or ``ties``.
        lam: Share of the second of two models (average, fisher: 0.4; wise-ft: 0.5), or scale of the task
            vectors (task-arithmetic: 0.4; ties: 1).
        weights: How much each model counts, instead of ``lam``; for ties beside it.
        fisher: Files of Fisher information, one a model, as :func:`fisher` writes them.
        base: The weights that the models started from: a folder or a file.
        density: Share of each task vector that ties keeps, 0.2 by default.
        force: Replace ``out`` if it is there.
        progress: Who hears how far the work is.

    Raises:
        CofimaError: Everything that is wrong with the request or the files, before anything is written.
    """
    given = None if fisher is None else [Path(path) for path in fisher]
    start_at = None if base is None else Path(base)
    wish = Wish(method, [Path(path) for path in models], lam, weights, given, start_at, density)
    out = Path(out)
    _refuse(wish, out, force)
    every = [*([wish.base] if wish.base else []), *wish.models]
    opened = _all(open_source, every)
    start = opened[0] if wish.base else None
    sources = opened if wish.method == WISE_FT else opened[len(every) - len(wish.models) :]
    start = None if wish.method == WISE_FT else start  # it is the first of two models
    return _write(sources, start, wish, out, progress)


def _write(
    sources: Sequence[Source], start: Source | None, wish: Wish, out: Path, progress: Progress
) -> Merged:
    recipe = wish.recipe()
    given = open_fishers(wish.fishers, sources) if wish.fishers else None
    notes = _notes(sources, recipe, given)
    if not wish.models[-1].is_dir():
        size = merge_files(sources, start, given, recipe, out, progress)
        return Merged(out, size, notes=notes)
    plan = folder_merge(sources, start, given, recipe)
    after, size = plan.write(out, progress)
    notes += [after.note] if after.note else []
    notes += _left_behind(plan)
    return Merged(out, size, methods.find(after.method).label, plan.rows.union, notes)


def _refuse(wish: Wish, out: Path, force: bool) -> None:
    """Raise one error with everything that is wrong before a file is opened."""
    found = wish.problems()
    inputs = [*wish.models, *([wish.base] if wish.base else []), *(wish.fishers or ())]
    found += [f"{path}: no such file or folder" for path in inputs if not path.exists()]
    folders = [path for path in wish.models if path.is_dir()]
    files = [path for path in wish.models if path.is_file()]
    if folders and files:
        found.append(f"{folders[0]} is a folder and {files[0]} a file: merge folders, or files")
    if wish.base and wish.base.is_dir() and files:
        found.append(f"base = {wish.base}: files start from a file, not from a folder")
    found += out_problems(out, inputs, bool(folders), force) if folders or files else []
    if found:
        raise problems("the merge", found)


def _all(work: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """Do the work on every path; tell all failures at once."""
    done, found = [], []
    for path in paths:
        try:
            done.append(work(path))
        except CofimaError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise problems("the merge", [str(error).replace("\n", "\n  ") for error in found])
    return done


def _notes(sources: Sequence[Source], recipe: Recipe, fishers: Fishers | None) -> list[str]:
    notes = fishers.note() if fishers else []
    if recipe.lam not in (0, 1) and any(key.endswith("running_var") for key in sources[-1].weights):
        notes.append(
            "statistics of batch normalisation are merged too; estimate them anew on images if you can"
        )
    return notes


def _left_behind(plan: FolderMerge) -> list[str]:
    notes = []
    if len({source.kept["backbone"]["sha256"] for source in plan.folders}) > 1:
        notes.append(
            "the models were trained from different pre-trained weights: expect little of their average"
        )
    if any(source.kept.get("serving") for source in plan.folders):
        notes.append(
            "calibration, held-out accuracies and kept images belong to the models and stay with them"
        )
    return notes
