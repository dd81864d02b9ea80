"""Logits, features and per-class accuracy of a model on labeled images."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cofima.core.errors import CofimaError, CofimaWarning, did_you_mean, first_problems
from cofima.core.progress import Progress
from cofima.core.wording import count, some
from cofima.data.image_set import ImageSet
from cofima.data.sources.listing import LabeledImages, find_images
from cofima.methods.components.gaussians import Gaussians, Sampler
from cofima.models.head import PowerHead
from cofima.store.held_out import HeldOut
from cofima.store.model import Model
from cofima.training.loop import plain_batches


def read_known(
    model: Model,
    path: Path,
    part: str,
    *,
    only_known: bool = False,
    advice: str = "",
    skip_unreadable: bool,
    progress: Progress,
) -> LabeledImages:
    """Read the images of a folder or CSV file; raise if a class is not one of the model's.

    From a folder with ``train`` and ``test``, only ``part`` is read. With ``only_known``, other classes are
    skipped with a warning that names them; ``advice`` tells how to request that.
    """
    found, classes = find_images(path).only(part), model.classes
    unknown = [name for name in found.classes if name not in classes]
    if unknown and not only_known:
        wrong = [f"class '{name}' is not known to the model{_hint(name, classes)}" for name in unknown]
        raise CofimaError(f"{first_problems(str(path), wrong)}{advice}")
    if unknown:
        found = found.of(classes)
        text = f"{path}: left out {count(len(unknown), 'class', 'es')} that the model does not know"
        warnings.warn(f"{text}: {some(unknown)}", CofimaWarning, stacklevel=3)
    if not found.files:
        raise CofimaError(f"{path}: no images{' of classes that the model knows' if unknown else ''}")
    return found.read(model.view.pixel_format, skip_unreadable=skip_unreadable, progress=progress)


def _hint(name: str, classes: list[str]) -> str:
    """Return the class that was probably meant, or all classes if they are few."""
    hint = did_you_mean(name, classes)
    return hint if len(classes) <= 20 or "did you mean" in hint else ""


def to_probabilities(model: Model, logits: Tensor) -> Tensor:
    """Return calibrated probabilities."""
    return torch.softmax(logits / model.serving.get("temperature", 1.0), dim=1)


@torch.inference_mode()
def logits_of(model: Model, images: ImageSet, label: str = "held-out images") -> Tensor:
    """Return the logits of images over all classes, with the offsets of the calibration, on the CPU."""
    model.method.net.eval()
    pairs = plain_batches(images, model.method.context, label)
    found = [model.method.predict(x).float().cpu() for x, _ in pairs] if len(images) else []
    return model.offset(torch.cat(found)) if found else torch.zeros(0, len(model.classes))


@torch.inference_mode()
def features_of(model: Model, images: ImageSet, label: str = "held-out images") -> Tensor:
    """Return the features of images, on the CPU."""
    if not len(images):
        return torch.zeros(0, model.width)
    model.method.net.eval()
    pairs = plain_batches(images, model.method.context, label)
    return torch.cat([model.method.net.features(x).float().cpu() for x, _ in pairs])


def gaussians_of(model: Model) -> Gaussians | None:
    """Return the class Gaussians of the model's method, or None unless it has one for every class."""
    kept = model.method.class_statistics()
    return kept if kept is not None and len(kept) == len(model.classes) else None


def draw_features(gaussians: Gaussians, counts: list[int], model: Model) -> tuple[Tensor, Tensor]:
    """Sample ``counts[c]`` features from the Gaussian of each class; return them with labels, on the CPU."""
    generator = model.method.context.seeds.generator("drawn features")
    return Sampler(gaussians, torch.device("cpu")).draw(counts, generator)


@torch.inference_mode()
def raw_logits(model: Model, features: Tensor) -> Tensor:
    """Return the head's logits of features, without offsets; for methods that predict from features only."""
    if not len(features):
        return torch.zeros(0, len(model.classes))
    logits: Tensor = model.method.head()(features.to(model.method.context.device))
    return logits.float().cpu()


@torch.inference_mode()
def drawn_logits(model: Model, features: Tensor) -> Tensor:
    """Return the head's logits for features drawn from class statistics, which are normalized already."""
    head = model.method.head()
    answer = head.linear if isinstance(head, PowerHead) else head
    logits: Tensor = answer(features.to(model.method.context.device))
    return logits.float().cpu()


@torch.inference_mode()
def held_out_logits(model: Model, held: HeldOut) -> Tensor:
    """Return the head's logits of stored features; leave-one-out for those that it was fitted on."""
    logits, taught = raw_logits(model, held.features), held.taught
    if taught.any():
        alone = model.method.left_out_logits(held.features[taught], held.labels[taught])
        if alone is not None:
            logits[taught] = alone
    return logits


def logits_of_features(model: Model, features: Tensor) -> Tensor:
    """Return the logits of features, with the offsets of the calibration."""
    return model.offset(raw_logits(model, features))


@dataclass(frozen=True)
class Accuracy:
    """Numbers of correct predictions and of images, per class."""

    right: dict[str, float]
    images: dict[str, int]

    @classmethod
    def of(cls, answers: Tensor, labels: Tensor, classes: list[str]) -> "Accuracy":
        """Count from predicted classes and labels."""
        return cls.counted(answers == labels, labels, classes)

    @classmethod
    def counted(cls, right: Tensor, labels: Tensor, classes: list[str]) -> "Accuracy":
        """Count from correctness per image (bool, or a probability) and labels."""
        many = len(classes)
        counts = right if right.is_floating_point() else right.long()
        hits = torch.zeros(many, dtype=counts.dtype).index_add(0, labels, counts).tolist()
        each = torch.bincount(labels, minlength=many).tolist()
        seen = [place for place in range(many) if each[place]]
        return cls({classes[p]: hits[p] for p in seen}, {classes[p]: each[p] for p in seen})

    def among(self, names: Collection[str]) -> "Accuracy":
        """Return the accuracy on some classes."""
        mine = [name for name in self.images if name in names]
        return Accuracy({name: self.right[name] for name in mine}, {name: self.images[name] for name in mine})

    @property
    def percent(self) -> float | None:
        """Accuracy over all images in percent, or None without images."""
        total = sum(self.images.values())
        return 100 * sum(self.right.values()) / total if total else None

    @property
    def by_class(self) -> dict[str, float]:
        """Accuracy in percent of each class that has images."""
        return {name: 100 * self.right[name] / count for name, count in self.images.items()}

    def by_task(self, tasks: Sequence[Sequence[str]]) -> tuple[list[float | None], list[int]]:
        """Return the accuracy of each task in percent (None without images) and its number of images."""
        images = [sum(self.images.get(name, 0) for name in task) for task in tasks]
        right = [sum(self.right.get(name, 0) for name in task) for task in tasks]
        return [100 * r / n if n else None for r, n in zip(right, images, strict=True)], images

    @property
    def mean_of_classes(self) -> float:
        """Mean accuracy over classes, each with the same weight however many images it has."""
        values = self.by_class.values()
        return sum(values) / len(values)


def accuracy_of(model: Model, images: ImageSet, label: str = "held-out images") -> Accuracy:
    """Return the accuracy of a model on labeled images."""
    return Accuracy.of(logits_of(model, images, label).argmax(1), images.labels, model.classes)
