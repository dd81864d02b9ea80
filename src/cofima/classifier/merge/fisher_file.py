"""Measure the diagonal Fisher information of a saved model on a folder of images."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from cofima.classifier.classifier import load
from cofima.classifier.merge.inputs import HEAD, MODEL, require_linear
from cofima.classifier.merge.request import output_problems
from cofima.classifier.scoring import read_known
from cofima.core.atomic import require_space, write_aside
from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.data.image_set import ImageSet
from cofima.data.splits import choose_images
from cofima.methods.state import declared
from cofima.store.model import Model
from cofima.training.loop import plain_batches
from cofima.weights.fisher.diagonal import diagonal_fisher
from cofima.weights.fisher.labels import LabelMode
from cofima.weights.mmap import write_tensors
from cofima.weights.ops import Weights


@dataclass(frozen=True)
class Measured:
    """Result of a measurement: the file, and the number of images and of classes."""

    path: Path
    images: int
    classes: int


def fisher(
    model: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    labels: LabelMode = "data",
    logits: Literal["seen", "local"] = "seen",
    max_per_class: int | None = None,
    skip_unreadable: bool = False,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    progress: Progress = SILENT,
) -> Measured:
    """Measure the diagonal Fisher information of a saved model, and write it under the names of its weights.

    Args:
        model: A model folder.
        images: A folder with one subfolder per class, or with ``train`` (which is used) and ``test``, or a
            CSV file (path,label). All classes must be known to the model, by name.
        out: The .safetensors file to write.
        labels: ``data`` uses the true labels (empirical Fisher), ``sampled`` draws a label from the model's
            prediction for each image, ``exact`` takes the expectation over all classes.
        logits: Softmax over all classes of the model (``seen``), or over those in the folder (``local``).
        max_per_class: Maximum number of images per class.
        skip_unreadable: Skip unreadable images instead of raising.
        seed: Random seed of sampled labels, and of the images that ``max_per_class`` selects.
        device: Device to compute on; ``auto`` chooses.
        force: Replace ``out`` if it exists.
        progress: Receives progress reports.

    Returns:
        The file, and the number of images and of classes.

    Raises:
        CofimaError: With all problems of the request, the model or the images.

    Example::

        import cofima

        cofima.fisher("parts_berlin", "photos_berlin", "berlin.safetensors")
        cofima.fisher("parts_paris", "photos_paris", "paris.safetensors")
        files = ["berlin.safetensors", "paris.safetensors"]
        cofima.merge(["parts_berlin", "parts_paris"], "parts_both", "fisher", fisher=files)
    """
    model, images, out = Path(model), Path(images), Path(out)
    _refuse(model, images, out, logits, max_per_class, force)
    loaded = load(model, device=device, progress=progress).model
    kind = type(loaded.method)
    require_linear(model, kind, declared(kind, loaded.method.state()))
    size = sum(value.nbytes for value in loaded.weights().values())
    require_space(out, size)
    read = read_known(loaded, images, "train", skip_unreadable=skip_unreadable, progress=progress)
    known = read.images(loaded.classes)
    if max_per_class is not None:
        known = known.select(choose_images(known, lambda _: max_per_class, seed))
    columns = _columns(known, loaded.classes) if logits == "local" else None
    progress.say(f"measuring {size / 1e6:,.1f} MB of weights on {len(known)} images")
    measured = _measure(loaded, known, labels, columns, seed)
    assert loaded.generation is not None
    said = {
        "estimator": "sample",
        "labels": labels,
        "logits": logits,
        "images": len(known),
        "data": known.fingerprint(),
        MODEL: loaded.generation.record.weights_digest,
        "classes": json.dumps(loaded.classes, ensure_ascii=False),
    }
    with write_aside(out) as aside:
        write_tensors(aside, measured, {key: str(value) for key, value in said.items()})
    return Measured(out, len(known), len(known.counts()))


def _measure(model: Model, known: ImageSet, labels: LabelMode, columns: slice | None, seed: int) -> Weights:
    """Return the Fisher information under timm's parameter names, with the head's blocks joined."""
    context = model.method.context
    # a method may predict with another head than the one it trains (net.head)
    net = nn.Sequential(OrderedDict(backbone=model.method.net.backbone, head=model.method.head()))
    found = diagonal_fisher(
        net,
        plain_batches(known, context, "fisher"),
        labels,
        columns=columns,
        generator=torch.Generator().manual_seed(seed),
    )
    body = {
        key.removeprefix("backbone."): value for key, value in found.items() if key.startswith("backbone.")
    }
    blocks = range(len(model.method.head().blocks))
    for key in HEAD:
        body[f"{model.backbone.classifier}.{key}"] = torch.cat(
            [found[f"head.blocks.{k}.{key}"] for k in blocks]
        )
    return {key: value.cpu().contiguous() for key, value in body.items()}


def _columns(known: ImageSet, classes: list[str]) -> slice:
    """Return the logit columns of the folder's classes, which must be adjacent."""
    there = sorted(known.counts())
    if there != list(range(there[0], there[-1] + 1)):
        between = [classes[c] for c in range(there[0], there[-1]) if c not in there]
        raise CofimaError(
            "logits = local: the classes of the folder must be adjacent in the model; "
            f"between them are {', '.join(between[:10])}. Use seen, or add their images"
        )
    if len(there) == 1:
        raise CofimaError("logits = local: a single class has nothing to be told apart from; use seen")
    return slice(there[0], there[-1] + 1)


def _refuse(
    model: Path, images: Path, out: Path, logits: str, max_per_class: int | None, force: bool
) -> None:
    found = [] if model.is_dir() else [f"{model}: no such folder"]
    found += [] if images.exists() else [f"{images}: no such folder or file"]
    if logits not in ("seen", "local"):
        found.append(f"logits = {logits}: must be seen or local")
    if max_per_class is not None and max_per_class < 1:
        found.append(f"max_per_class = {max_per_class}: must be at least 1")
    found += output_problems(out, [model, images], folder=False, force=force)
    if found:
        raise problems("the measurement", found)
