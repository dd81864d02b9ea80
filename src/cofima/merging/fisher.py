"""Measure the diagonal Fisher information of a saved model on a folder of images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cofima import store
from cofima.data.known import KnownImages, load_known
from cofima.errors import CofimaError, problems
from cofima.merging.fishers import MODEL
from cofima.merging.place import check_room, out_problems, written_aside
from cofima.merging.sources import refuse_parts
from cofima.models.head import Head
from cofima.progress import SILENT, Progress
from cofima.store import Model
from cofima.training.sgd import plain_batches
from cofima.weights.fisher import diagonal_fisher
from cofima.weights.labels import LabelMode
from cofima.weights.pieces import Weights


@dataclass(frozen=True)
class Measured:
    """What a measurement came to: the file, and of how many images and classes."""

    path: Path
    images: int
    classes: int


class _Predictor(nn.Module):
    """Backbone and the head that predicts, which need not be the one that is trained."""

    def __init__(self, backbone: nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits


def fisher(
    model: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    labels: LabelMode = "data",
    logits: Literal["seen", "local"] = "seen",
    limit: int | None = None,
    skip_bad: bool = False,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    progress: Progress = SILENT,
) -> Measured:
    """Write the diagonal Fisher information of a model folder, under the names of its model.safetensors.

    Args:
        model: A model folder.
        images: A folder with one folder per class, or with ``train`` (which is taken) and ``test``. Its
            classes must be classes of the model, by name.
        out: The .safetensors file to write.
        labels: ``data`` takes the folder's classes, ``sampled`` draws one from the model for each image,
            ``exact`` takes the expectation over all classes.
        logits: Softmax over all classes of the model (seen), or over those in the folder (local).
        limit: At most so many images of each class.
        skip_bad: Leave out unreadable images instead of refusing the folder.
        seed: Decides sampled labels, and which images ``limit`` takes.
        device: Where to compute.
        force: Replace ``out`` if it is there.
        progress: Who hears how far the work is.

    Raises:
        CofimaError: Everything that is wrong with the request, the model or the images.
    """
    model, images, out = Path(model), Path(images), Path(out)
    _refuse(model, images, out, logits, limit, force)
    _, kept = store.opened(model)
    loaded = store.load(model, where=device, progress=progress)
    loaded.see_photographs()
    refuse_parts(model, kept, loaded.method.state())
    size = sum(value.nbytes for value in loaded.weights().values())
    check_room(out, size)
    known = load_known(
        images,
        loaded.view.form,
        loaded.classes,
        limit=limit,
        seed=seed,
        skip_bad=skip_bad,
        progress=progress,
    )
    progress.say(f"measuring {size / 1e6:,.1f} MB of weights on {len(known.images)} images")
    measured = _measure(
        loaded, known, labels, _columns(known, loaded.classes) if logits == "local" else None, seed
    )
    said = {
        "estimator": "sample",
        "labels": labels,
        "logits": logits,
        "images": len(known.images),
        "data": known.fingerprint,
        MODEL: kept["files"][store.WEIGHTS],
        "classes": json.dumps(loaded.classes, ensure_ascii=False),
    }
    with written_aside(out) as aside:
        save_file(measured, aside, {key: str(value) for key, value in said.items()})
    return Measured(out, len(known.images), len(known.images.counts()))


def _measure(
    model: Model, known: KnownImages, labels: LabelMode, columns: slice | None, seed: int
) -> Weights:
    """Return the Fisher information under timm's names, the head in one piece."""
    context = model.method.context
    net = _Predictor(model.method.net.backbone, model.method.head())
    found = diagonal_fisher(
        net,
        plain_batches(known.images, context, "fisher"),
        labels,
        columns=columns,
        generator=torch.Generator().manual_seed(seed),
    )
    body = {
        key.removeprefix("backbone."): value for key, value in found.items() if key.startswith("backbone.")
    }
    blocks = range(len(net.head.blocks))
    for key in ("weight", "bias"):
        body[f"{model.backbone.classifier}.{key}"] = torch.cat(
            [found[f"head.blocks.{k}.{key}"] for k in blocks]
        )
    return {key: value.cpu().contiguous() for key, value in body.items()}


def _columns(known: KnownImages, classes: list[str]) -> slice:
    """Return the logits of the folder's classes, which must stand beside each other."""
    there = sorted(known.images.counts())
    if there != list(range(there[0], there[-1] + 1)):
        between = [classes[c] for c in range(there[0], there[-1]) if c not in there]
        raise CofimaError(
            "logits = local: the classes of the folder must stand beside each other in the model; "
            f"between them are {', '.join(between[:10])}. Use seen, or add their images"
        )
    if len(there) == 1:
        raise CofimaError("logits = local: a single class has nothing to be told apart from; use seen")
    return slice(there[0], there[-1] + 1)


def _refuse(model: Path, images: Path, out: Path, logits: str, limit: int | None, force: bool) -> None:
    found = [f"{path}: no such folder" for path in (model, images) if not path.is_dir()]
    if logits not in ("seen", "local"):
        found.append(f"logits = {logits}: must be seen or local")
    if limit is not None and limit < 1:
        found.append(f"limit = {limit}: must be at least 1")
    found += out_problems(out, [model, images], folder=False, force=force)
    if found:
        raise problems("the measurement", found)
