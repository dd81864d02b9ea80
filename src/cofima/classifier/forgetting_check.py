r"""Loss of accuracy on old classes: measured on images or kept features of them, or estimated.

Where the backbone stayed as it was, kept features of held-out images measure exactly. Where it moved, they
move by the map that the current images show (:mod:`cofima.methods.components.drift`). A head that moved by
the same map would give the old answers back, however wrong the map is: so each old class also moves by what
the map misses on a current class that it was not fitted to. That needs three current classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cofima.classifier.calibrate import honest_answers
from cofima.classifier.scoring import Accuracy, features_of, held_out_logits, logits_of, logits_of_features
from cofima.core.errors import CofimaError, did_you_mean
from cofima.core.progress import Progress
from cofima.data.image_set import ImageSet
from cofima.data.sources.listing import find_images
from cofima.methods.components.drift import choose_alpha, drift_map, left_out_residuals
from cofima.store.held_out import HeldOut
from cofima.store.history import OldClasses
from cofima.store.model import Model

DRAWS = 200
LEAST_CLASSES = 3  # current classes from which on the error of the map is known
WIDEST = 10.0  # points: an interval of an estimate that is wider says nothing
INTERVAL = (0.05, 0.95)


@dataclass(frozen=True)
class OldClassComparison:
    """Accuracy on old classes before and after an extension.

    Attributes:
        before: Class by class.
        after: Class by class; the mean over draws, where it is an estimate.
        interval: The points lost are within it with a probability of 90 %, as far as these images can tell.
        measured: False for an estimate.
        rests_on: The images behind it, in words.
    """

    before: Accuracy
    after: Accuracy
    interval: tuple[float, float]
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
            drop_interval=(round(self.interval[0], 2), round(self.interval[1], 2)),
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


class Moved:
    """Kept features of old classes, as they may be after a backbone moved.

    Args:
        kept: The features before.
        before: Features of the current images before the backbone moved.
        after: Those of the same images afterwards.
        labels: Their classes.
        generator: Draws what the map misses.
    """

    def __init__(
        self, kept: HeldOut, before: Tensor, after: Tensor, labels: Tensor, generator: torch.Generator
    ) -> None:
        self.kept, self.labels, self.generator = kept, labels, generator
        self.still = not len(kept) or torch.equal(before, after)
        if not self.still:
            alpha = choose_alpha(before, after, labels)
            self.mapped = (kept.features.double() @ drift_map(before, after, alpha)).float()
            (residuals,) = left_out_residuals(before, after, labels, [alpha])
            self.residuals = residuals.float()

    @property
    def known(self) -> bool:
        """True if the error of the map can be told."""
        return self.still or len(torch.unique(self.labels)) >= LEAST_CLASSES

    def draw(self) -> Tensor:
        """Return the features, each class off the map as one of the current classes is."""
        if self.still:
            return self.kept.features
        if not self.known:
            return self.mapped
        found, current = self.mapped.clone(), torch.unique(self.labels)
        for label in torch.unique(self.kept.labels):
            mine = (self.kept.labels == label).nonzero().flatten()
            like = current[torch.randint(len(current), (1,), generator=self.generator)]
            theirs = (self.labels == like).nonzero().flatten()
            found[mine] += self.residuals[
                theirs[torch.randint(len(theirs), (len(mine),), generator=self.generator)]
            ]
        return found

    def draws(self) -> Iterator[Tensor]:
        """Yield as many draws as an estimate needs; one, where nothing moved."""
        for _ in range(1 if self.still else DRAWS):
            yield self.draw()

    def held_out(self) -> HeldOut:
        """Return the features to keep from now on."""
        if self.still:
            return self.kept
        no = torch.zeros_like(self.kept.exact)
        return replace(self.kept, features=self.draw(), taught=no, exact=no)


def moved_features(old: Model, new: Model, learned: list[ImageSet], still: bool) -> Moved:
    """Return the kept features of a model as the one that learned these images sees them.

    ``still`` says that the backbone is the same, so that there is nothing to compute.
    """
    labels = torch.cat([one.labels for one in learned])
    before = after = torch.zeros(0)
    if len(old.kept) and not still:
        before, after = (torch.cat([features_of(m, one, "drift") for one in learned]) for m in (old, new))
    return Moved(old.kept, before, after, labels, old.method.context.seeds.generator("drift", len(new.tasks)))


def compare_on_images(old: Model, new: Model, images: ImageSet, source: str) -> OldClassComparison:
    """Measure the loss of old classes on images of them."""
    answers = [logits_of(model, images, "old classes").argmax(1) for model in (old, new)]
    was, now = (found == images.labels for found in answers)
    return _comparison(old, was, now[None], images.labels, True, f"measured on {len(images)} images {source}")


def compare_on_features(old: Model, new: Model, moved: Moved, logits: Tensor) -> OldClassComparison | str:
    """Measure or estimate the loss of old classes on kept features; return the reason if neither works.

    Args:
        old: The model before.
        new: The model that has learned more.
        moved: The kept features of the old one, as the new one sees them.
        logits: The new head's answers to its own kept features, of which those of old classes come first.
    """
    kept = moved.kept
    if not len(kept):
        return "no features of their images are kept"
    if not moved.known:
        return f"the backbone moved, and fewer than {LEAST_CLASSES} classes show how"
    was = honest_answers(old, held_out_logits(old, kept), kept.labels) == kept.labels
    if moved.still:
        answers = honest_answers(new, logits, new.kept.labels)
        now = (answers[: len(kept)] == kept.labels)[None]
    else:
        drawn = [logits_of_features(new, features).argmax(1) for features in moved.draws()]
        now = torch.stack(drawn) == kept.labels
    exact = moved.still and bool(kept.exact.all())
    how = "measured on" if exact else "estimated from"
    found = _comparison(old, was, now, kept.labels, exact, f"{how} the features of {len(kept)} images")
    low, high = found.interval
    if not exact and high - low > WIDEST:
        return f"an estimate would say {low:.0f} to {high:.0f} points lost, which says too little"
    return found


def _comparison(
    old: Model, was: Tensor, now: Tensor, labels: Tensor, measured: bool, rests_on: str
) -> OldClassComparison:
    before, after = (
        Accuracy.counted(right.double(), labels, old.classes) for right in (was, now.double().mean(0))
    )
    return OldClassComparison(before, after, drop_interval(was, now, labels), measured, rests_on)


def drop_interval(was: Tensor, now: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the 90 % interval of the points lost, as the mean over classes.

    A Bayesian bootstrap: every class, and every image of a class, has a random weight. One more image, of
    all classes together, is half lost and half won: that none of few changed does not show that none would.

    Args:
        was: True for each image that was right before.
        now: The same afterwards, for each of some draws [draws, images].
        labels: The class of each image.
    """
    places, chance = torch.unique(labels, return_inverse=True)[1], np.random.default_rng(0)
    classes = int(places.max()) + 1
    weights = torch.from_numpy(chance.standard_exponential((DRAWS, len(labels))))
    extra = torch.from_numpy(chance.standard_gamma(0.5 / classes, (2, DRAWS, classes)))
    lost = was.double() - now.double()[torch.arange(DRAWS) % len(now)]

    def per_class(values: Tensor) -> Tensor:
        return torch.zeros(DRAWS, classes, dtype=torch.float64).index_add(1, places, values)

    above, below = per_class(weights * lost) + extra[0] - extra[1], per_class(weights) + extra.sum(0)
    each = torch.from_numpy(chance.standard_exponential((DRAWS, classes)))
    drops = 100 * (each * above / below).sum(1) / each.sum(1)
    low, high = torch.quantile(drops, torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return low, high


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
