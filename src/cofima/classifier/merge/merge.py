"""Merge checkpoints: one function for files, model folders and adapters."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cofima import methods
from cofima.classifier.merge import class_lists
from cofima.classifier.merge.adapters import is_adapter, merge_adapters
from cofima.classifier.merge.folders import merge_folders
from cofima.classifier.merge.inputs import (
    CheckpointFile,
    Inputs,
    ModelFolder,
    head_merges,
    network_merges,
    open_checkpoint,
    open_fishers,
)
from cofima.classifier.merge.request import WISE_FT, MergeRequest, MergeSettings, output_problems
from cofima.classifier.merge.tensors import merge_tensors
from cofima.core.atomic import require_space, write_aside
from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.core.wording import some
from cofima.weights.mmap import create_mapped


@dataclass(frozen=True)
class Merged:
    """Result of a merge.

    Attributes:
        path: The merged file or model folder.
        bytes: Size of its tensors.
        label: The method that a merged folder continues with; empty for a file.
        classes: Class names, in the order of the logits; empty for a file without names.
        notes: Messages for the user.
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
    outliers: float | None = None,
    seed: int | None = None,
    skip: Sequence[str] = (),
    classes: Sequence[str | Path] | None = None,
    head: str | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Merged:
    """Merge model folders, or files of weights, into one.

    Tensors are streamed from disk to disk, so memory stays small however large the models are. Folders may
    have different classes: the rows of their heads are matched by class name.

    Args:
        models: Two or more model folders or files (.safetensors, .pth, .pth.tar, .pt, .bin); one is enough
            with a ``base``. Folders of LoRA adapters, as peft writes them, can be averaged too.
        out: The merged folder or file.
        method: ``average``, ``fisher``, ``wise_ft``, ``task_arithmetic``, ``ties``, ``magmax``,
            ``model_stock``, ``breadcrumbs`` or ``dare``.
        lam: Share of the second of two models (0.5), or scale of the task vectors (task_arithmetic, dare:
            0.4; ties: 1; magmax: 0.5; breadcrumbs: 0.2).
        weights: Weight of each model, instead of ``lam`` (with ties: in addition to it). Not for magmax and
            model_stock.
        fisher: Files of Fisher information, one per model, as :func:`cofima.fisher` writes them.
        base: The weights that the models were fine-tuned from: a folder or a file.
        density: Share of each task vector that is kept (ties: 0.2; breadcrumbs: 0.15; dare: 0.1).
        outliers: Share of the largest elements of each tensor's task vector that breadcrumbs drops, 0.006 by
            default.
        seed: Random seed of the elements that dare drops, 0 by default.
        skip: Name patterns (``fc.*``) of tensors to leave out of merged files.
        classes: Text files with one class name per line, one file per model, to merge the heads of files
            class by class.
        head: Name of the classification layer, if several layers have one row per class.
        force: Replace ``out`` if it exists.
        progress: Receives progress reports.

    Returns:
        The path, size, method and classes of the result, and messages for the user.

    Raises:
        CofimaError: With all problems of the request or the files, before anything is written.

    Example::

        import cofima

        cofima.merge(["parts_berlin", "parts_paris"], "parts_both")
        files = ["a.safetensors", "b.safetensors"]
        cofima.merge(files, "merged.safetensors", "ties", base="pretrained.safetensors")
    """
    request = MergeRequest(
        method,
        [Path(path) for path in models],
        lam,
        weights,
        None if fisher is None else [Path(path) for path in fisher],
        None if base is None else Path(base),
        density,
        outliers,
        seed,
        list(skip),
        None if classes is None else [Path(path) for path in classes],
        head,
    )
    out = Path(out)
    if any(is_adapter(path) for path in request.models):
        return Merged(out, *merge_adapters(request, out, force))
    _refuse(request, out, force)
    inputs, settings = _open(request), request.settings()
    notes = _notes(inputs, settings)
    if not request.models[-1].is_dir():
        names, size = _merge_files(inputs, settings, out, progress)
        return Merged(out, size, classes=names, notes=notes)
    after, names, size = merge_folders(inputs, settings, out, progress)
    notes += [after.note] if after.note else []
    notes += _left_behind(inputs.folders)
    return Merged(out, size, methods.find(after.name).label, names, notes)


def _refuse(request: MergeRequest, out: Path, force: bool) -> None:
    """Raise one error with all problems that can be found without opening a file."""
    found = request.problems()
    inputs = [*request.models, *([request.base] if request.base else []), *(request.fishers or ())]
    inputs += request.classes or ()
    found += [f"{path}: no such file or folder" for path in inputs if not path.exists()]
    folders = [path for path in request.models if path.is_dir()]
    files = [path for path in request.models if path.is_file()]
    if folders and files:
        found.append(f"{folders[0]} is a folder and {files[0]} a file: merge folders, or files")
    if request.base and request.base.is_dir() and files:
        found.append(f"base = {request.base}: files start from a file, not from a folder")
    found += output_problems(out, inputs, bool(folders), force) if folders or files else []
    if found:
        raise problems("the merge", found)


def _open(request: MergeRequest) -> Inputs:
    """Open all inputs; wise_ft takes the base as the first of its two models."""
    models = _open_all([*([request.base] if request.base else []), *request.models])
    models = class_lists.skip(models, request.skip) if request.skip else models
    base = models.pop(0) if request.base else None
    models, base = _name_rows(request, models, base)
    if base is not None and request.method == WISE_FT:
        models, base = [base, *models], None
    fishers = open_fishers(request.fishers, models, request.skip) if request.fishers else ()
    return Inputs(models, base, fishers)


def _name_rows(
    request: MergeRequest, models: list[CheckpointFile], base: CheckpointFile | None
) -> tuple[list[CheckpointFile], CheckpointFile | None]:
    """Attach class names to the heads of plain files, if they are known."""
    told = request.classes or ()
    classes = [class_lists.read_class_list(path) for path in told] or class_lists.known_classes(models)
    if not classes:
        return models, base
    models = class_lists.name_rows(models, classes, request.head)
    return models, base and class_lists.without_head(base, models[0].classifier)


def _open_all(paths: Sequence[Path]) -> list[CheckpointFile]:
    """Open every path; raise with all failures at once."""
    opened, found = [], []
    for path in paths:
        try:
            opened.append(open_checkpoint(path))
        except CofimaError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise problems("the merge", [str(error).replace("\n", "\n  ") for error in found])
    return opened


def _merge_files(
    inputs: Inputs, settings: MergeSettings, out: Path, progress: Progress
) -> tuple[list[str], int]:
    """Write the merged file; return its classes, if their names are known, and the size of its tensors.

    Integer tensors and metadata are those of the last model that has them.
    """
    inputs.require_fit()
    classes = class_lists.union(inputs.models)
    kinds = inputs.kinds() | inputs.head_kinds(len(classes))
    size = sum(kind.bytes for kind in kinds.values())
    require_space(out, size)
    progress.say(f"merging {len(inputs.models)} models of {size / 1e6:,.1f} MB: {settings}")
    inputs.require_finite(progress)
    with write_aside(out) as aside, create_mapped(aside, kinds, _metadata(inputs, classes)) as target:
        merges = [*network_merges(inputs, target), *head_merges(inputs, classes, target)]
        merge_tensors(merges, settings, progress)
    return classes, size


def _metadata(inputs: Inputs, classes: Sequence[str]) -> dict[str, str]:
    """Return the metadata of all files, without what ``cofima export`` wrote about other classes."""
    found = {key: text for model in inputs.models for key, text in model.metadata.items()}
    if classes:
        found = {key: text for key, text in found.items() if not key.startswith("cofima.")}
        found[class_lists.CLASSES] = json.dumps(classes, ensure_ascii=False)
    return found


def _notes(inputs: Inputs, settings: MergeSettings) -> list[str]:
    notes, last = [], inputs.models[-1].every_weight
    fishers = inputs.fishers[-1] if inputs.fishers else last
    without = [key for key, value in last.items() if value.is_floating_point() and key not in fishers]
    if without:  # usually buffers
        notes.append(
            f"{len(without)} tensors have no Fisher information and are averaged plainly: {some(without, 3)}"
        )
    if settings.lam not in (0, 1) and any(key.endswith("running_var") for key in last):
        notes.append(
            "statistics of batch normalization are merged too; estimate them anew on images if you can"
        )
    return notes


def _left_behind(folders: Sequence[ModelFolder]) -> list[str]:
    notes = []
    if len({folder.record.backbone["sha256"] for folder in folders}) > 1:
        notes.append(
            "the models were trained from different pre-trained weights: expect little of their average"
        )
    if any(folder.record.serving for folder in folders):
        notes.append(
            "calibration, held-out accuracies and kept images belong to the models and stay with them"
        )
    return notes
