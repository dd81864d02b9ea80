r"""Drop in accuracy of old classes: measured on images or stored features of them, or estimated.

If the backbone is unchanged, stored features of held-out images give an exact measurement. If it changed,
they are mapped to the new backbone by the drift map fitted on the current images
(:mod:`cofima.methods.components.drift`). A head that was mapped likewise would repeat its old predictions,
however wrong the map is. Therefore each old class is also shifted by residuals of the map on a current class
that it was not fitted on. This needs three current classes.
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
LEAST_CLASSES = 3  # minimum number of current classes to estimate the error of the map
WIDEST = 10.0  # percentage points: an estimate with a wider interval is not reported
INTERVAL = (0.05, 0.95)


@dataclass(frozen=True)
class OldClassComparison:
    """Accuracy on old classes before and after an extension.

    Attributes:
        before: Accuracy per class.
        after: Accuracy per class; the mean over draws for an estimate.
        interval: 90 % interval of the drop in points, over the choice of these images.
        measured: False for an estimate.
        rests_on: Description of the images it is based on.
    """

    before: Accuracy
    after: Accuracy
    interval: tuple[float, float]
    measured: bool
    rests_on: str

    @property
    def drop(self) -> float:
        """Drop in percentage points, as the mean over classes."""
        return self.before.mean_of_classes - self.after.mean_of_classes

    def recorded(self) -> OldClasses:
        """Return the comparison for a history row."""
        return OldClasses(
            before=round(self.before.mean_of_classes, 2),
            after=round(self.after.mean_of_classes, 2),
            drop_interval=(round(self.interval[0], 2), round(self.interval[1], 2)),
            measured=self.measured,
            rests_on=self.rests_on,
        )


class ForgettingError(CofimaError):
    """Raised if old classes would lose more accuracy than allowed; the model is unchanged.

    Attributes:
        comparison: Accuracy on old classes before and after.
        allowed: The allowed drop in percentage points.
    """

    def __init__(self, comparison: OldClassComparison, allowed: float) -> None:
        self.comparison, self.allowed = comparison, allowed
        super().__init__(
            f"old classes would lose {comparison.drop:.1f} points, more than the {allowed:g} allowed "
            f"(mean over classes, {comparison.rests_on}); the model stays as it was"
        )


class Moved:
    """Stored features of old classes, mapped to a changed backbone.

    Args:
        kept: The stored features.
        before: Features of the current images before the backbone changed.
        after: Features of the same images afterwards.
        labels: Classes of the current images.
        generator: Random generator for the draws of residuals.
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
        """True if the error of the map can be estimated."""
        return self.still or len(torch.unique(self.labels)) >= LEAST_CLASSES

    def draw(self) -> Tensor:
        """Return the mapped features, each old class with residuals drawn from one current class.

        All images of a class use the same current class, as errors of the map are shared within a class.
        """
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
        """Yield as many draws as an estimate needs; a single one if the backbone is unchanged."""
        for _ in range(1 if self.still else DRAWS):
            yield self.draw()

    def held_out(self) -> HeldOut:
        """Return the features to store for the changed backbone."""
        if self.still:
            return self.kept
        no = torch.zeros_like(self.kept.exact)
        return replace(self.kept, features=self.draw(), taught=no, exact=no)


def moved_features(old: Model, new: Model, learned: list[ImageSet], still: bool) -> Moved:
    """Return the stored features of ``old``, mapped to the backbone of ``new``.

    The map is fitted on the images that ``new`` has just learned. With ``still`` the backbones are the same,
    and nothing is computed.
    """
    labels = torch.cat([one.labels for one in learned])
    before = after = torch.zeros(0)
    if len(old.kept) and not still:
        before, after = (torch.cat([features_of(m, one, "drift") for one in learned]) for m in (old, new))
    return Moved(old.kept, before, after, labels, old.method.context.seeds.generator("drift", len(new.tasks)))


def compare_on_images(old: Model, new: Model, images: ImageSet, source: str) -> OldClassComparison:
    """Measure the drop of old classes on images of them."""
    answers = [logits_of(model, images, "old classes").argmax(1) for model in (old, new)]
    was, now = (found == images.labels for found in answers)
    return _comparison(old, was, now[None], images.labels, True, f"measured on {len(images)} images {source}")


def compare_on_features(old: Model, new: Model, moved: Moved, logits: Tensor) -> OldClassComparison | str:
    """Measure or estimate the drop of old classes on stored features; return the reason if neither works.

    Args:
        old: The model before the extension.
        new: The extended model.
        moved: Stored features of the old model, mapped to the new backbone.
        logits: Logits of the new model's own stored features; those of old classes come first.
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
    """Return the 90 % interval of the drop in points, as the mean over classes.

    This is a Bayesian bootstrap: every class, and every image of a class, has a random weight. One pseudo
    image, spread over all classes, counts as half lost and half gained: if none of a few images changed, that
    does not show that none would.

    Args:
        was: True for each image that was classified correctly before.
        now: The same afterwards, per draw [draws, images].
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
    """Return images of old classes, from ``folder`` or stored in the model, and a description of them."""
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
