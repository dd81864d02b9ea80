"""What old classes lost: measured on images of them, or estimated from what is remembered of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cofima.data.images import ImageSet
from cofima.errors import CofimaError
from cofima.parts.gaussians import ClassGaussians
from cofima.serve.scoring import Accuracy, drawn, logits_of, logits_of_features
from cofima.store import Model

DRAWN = 200  # features of each class


@dataclass(frozen=True)
class Comparison:
    """Accuracy on old classes before and after, in percent, and what it rests on."""

    before: Accuracy
    after: Accuracy
    measured: bool
    rests_on: str

    @property
    def drop(self) -> float:
        """Return the points lost, as the mean over classes."""
        return self.before.mean_of_classes - self.after.mean_of_classes

    def as_json(self) -> dict[str, float | bool | str]:
        """Return what the history keeps."""
        return {
            "before": round(self.before.mean_of_classes, 2),
            "after": round(self.after.mean_of_classes, 2),
            "measured": self.measured,
            "rests_on": self.rests_on,
        }


class ForgettingError(CofimaError):
    """Old classes would lose more than was allowed; the model stays as it was."""

    def __init__(self, comparison: Comparison, allowed: float) -> None:
        self.comparison, self.allowed = comparison, allowed
        super().__init__(
            f"old classes would lose {comparison.drop:.1f} points, more than the {allowed:g} allowed "
            f"(mean over classes, {comparison.rests_on}); the model stays as it was"
        )


def answers(model: Model, images: ImageSet, label: str) -> Tensor:
    """Return the class that a model names for each image."""
    return logits_of(model, images, label).argmax(1)


def measure(before: Tensor, after: Tensor, images: ImageSet, classes: list[str], source: str) -> Comparison:
    """Compare the answers of two models on images of old classes."""
    was, now = (Accuracy.of(found, images.labels, classes) for found in (before, after))
    return Comparison(was, now, True, f"measured on {len(images)} images {source}")


def estimate(
    gaussians: ClassGaussians, old: Model, new: Model, features_old: Tensor, features_new: Tensor
) -> Comparison:
    """Draw features of old classes, and move them as the new images moved between the two backbones.

    Each feature takes the drift of one new image: old classes are assumed to drift as new ones do.
    """
    classes = old.classes
    features, labels = drawn(gaussians, [DRAWN] * len(gaussians), old)
    chance = old.method.context.seeds.generator("drift")
    drift = (features_new - features_old)[torch.randint(len(features_new), (len(labels),), generator=chance)]
    was = Accuracy.of(logits_of_features(old, features).argmax(1), labels, classes)
    now = Accuracy.of(logits_of_features(new, features + drift).argmax(1), labels, classes)
    return Comparison(was, now, False, "estimated from stored statistics: no images of old classes")
