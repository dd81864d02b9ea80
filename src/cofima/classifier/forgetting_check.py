"""Loss of accuracy on old classes: measured on images of them, or estimated from stored statistics."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cofima.classifier.scoring import (
    Accuracy,
    draw_features,
    features_of,
    gaussians_of,
    logits_of,
    logits_of_features,
)
from cofima.core.errors import CofimaError, did_you_mean
from cofima.core.progress import Progress
from cofima.data.image_set import ImageSet
from cofima.data.sources.listing import find_images
from cofima.methods.components.gaussians import Gaussians
from cofima.store.history import OldClasses
from cofima.store.model import Model

DRAWN = 200  # features of each class


@dataclass(frozen=True)
class OldClassComparison:
    """Accuracy on old classes before and after an extension, and its basis in words."""

    before: Accuracy
    after: Accuracy
    measured: bool
    rests_on: str

    @property
    def drop(self) -> float:
        """Return the points lost, as the mean over classes."""
        return self.before.mean_of_classes - self.after.mean_of_classes

    def recorded(self) -> OldClasses:
        """Return the comparison as a part of a history row."""
        return OldClasses(
            before=round(self.before.mean_of_classes, 2),
            after=round(self.after.mean_of_classes, 2),
            measured=self.measured,
            rests_on=self.rests_on,
        )


class ForgettingError(CofimaError):
    """Old classes would lose more accuracy than allowed; the model is unchanged."""

    def __init__(self, comparison: OldClassComparison, allowed: float) -> None:
        self.comparison, self.allowed = comparison, allowed
        super().__init__(
            f"old classes would lose {comparison.drop:.1f} points, more than the {allowed:g} allowed "
            f"(mean over classes, {comparison.rests_on}); the model stays as it was"
        )


class ForgettingCheck:
    """Compare a model with the one that an extension makes of it, on the classes known before.

    Args:
        old: The model before it is extended.
        images: Images of its classes, or None.
        source: Their source, in words.
    """

    def __init__(self, old: Model, images: ImageSet | None, source: str) -> None:
        self.old, self.images, self.source = old, images, source
        self.before = None if images is None else answers(old, images, "old classes, before")
        self.learned: list[ImageSet] = []
        """Images that the extension learned; the estimate takes the drift of their features."""

    def compare(self, new: Model) -> OldClassComparison | None:
        """Measure the loss of old classes on images of them, or else estimate it if possible."""
        if self.images is not None and self.before is not None:
            after = answers(new, self.images, "old classes, after")
            return measure(self.before, after, self.images, self.old.classes, self.source)
        gaussians = gaussians_of(self.old)
        if gaussians is None:
            return None
        features = [torch.cat([features_of(m, one) for one in self.learned]) for m in (self.old, new)]
        return estimate(gaussians, self.old, new, *features)


def old_class_images(
    model: Model, folder: Path | None, skip_unreadable: bool, progress: Progress
) -> tuple[ImageSet | None, str]:
    """Return images of old classes, from ``folder`` or else those kept in the model, and their source."""
    if folder is None:
        kept = model.images
        return (kept, "kept in the model folder") if kept is not None and len(kept) else (None, "")
    found = find_images(folder).only("test")
    mine = found.of(model.classes)
    if not mine.files:
        close = did_you_mean(found.classes[0], model.classes[:20])
        raise CofimaError(f"{folder}: none of its classes is known to the model{close}")
    photos = mine.read(model.view.pixel_format, skip_unreadable=skip_unreadable, progress=progress)
    return photos.images(model.classes), f"of {folder}"


def answers(model: Model, images: ImageSet, label: str) -> Tensor:
    """Return the predicted label of each image."""
    return logits_of(model, images, label).argmax(1)


def measure(
    before: Tensor, after: Tensor, images: ImageSet, classes: list[str], source: str
) -> OldClassComparison:
    """Compare the answers of two models on images of old classes."""
    was, now = (Accuracy.of(found, images.labels, classes) for found in (before, after))
    return OldClassComparison(was, now, True, f"measured on {len(images)} images {source}")


def estimate(
    gaussians: Gaussians, old: Model, new: Model, features_old: Tensor, features_new: Tensor
) -> OldClassComparison:
    """Draw features of old classes, and move them as the new images moved between the two backbones.

    Each feature takes the drift of one new image: old classes are assumed to drift as new ones do.
    """
    classes = old.classes
    features, labels = draw_features(gaussians, [DRAWN] * len(gaussians), old)
    chance = old.method.context.seeds.generator("drift")
    drift = (features_new - features_old)[torch.randint(len(features_new), (len(labels),), generator=chance)]
    was = Accuracy.of(logits_of_features(old, features).argmax(1), labels, classes)
    now = Accuracy.of(logits_of_features(new, features + drift).argmax(1), labels, classes)
    return OldClassComparison(was, now, False, "estimated from stored statistics: no images of old classes")
