"""A model learns more, without the old images; the old model stays as it is until the new one is proven."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cofima import store
from cofima.data.images import ImageSet
from cofima.data.sources.listing import Listing, find_images
from cofima.errors import CofimaError, did_you_mean, problems
from cofima.progress import SILENT, Progress
from cofima.serve.calibrate import calibrate, features_of, remember_distances
from cofima.serve.check import Comparison, ForgettingError, answers, estimate, measure
from cofima.serve.lesson import more_images, new_classes, teach
from cofima.serve.scoring import Accuracy, accuracy_of, gaussians_of, image_set
from cofima.store import Model
from cofima.training.sgd import Train


@dataclass(frozen=True)
class Extension:
    """What an extension came to.

    Attributes:
        new: Classes that are new.
        more: Known classes that got more images.
        accuracy: On held-out images of all these, among all classes; empty where none were held out.
        old: What old classes lost, measured or estimated, or None where neither is possible.
        rows: What the history says of it.
    """

    new: list[str]
    more: list[str]
    train_images: int
    accuracy: Accuracy
    old: Comparison | None
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Wish:
    """What is asked of an extension."""

    photos: Path
    check: Path | None = None
    max_drop: float | None = None
    keep_images: int | None = None
    only_new: bool = False
    skip_bad: bool = False


def extend(model: Model, wish: Wish, how: Train, progress: Progress = SILENT) -> tuple[Model, Extension]:
    """Return another model that has learned the photographs too; this one stays as it is."""
    found = find_images(wish.photos)
    new, more = plan(model, wish, found)
    old_images, source = old_class_images(model, wish, progress)
    photos = found.read(model.view.form, skip_bad=wish.skip_bad, progress=progress)
    before = answers(model, old_images, "old classes, before") if len(old_images) else torch.empty(0)
    share = model.config.held_out or 0.15
    learned = store.copy(model, progress)
    rows, held = [], []
    features = FeatureDrift(model)
    for names, make in ((more, more_images), (new, new_classes)):
        if not names:
            continue
        classes = [*learned.classes, *(new if make is new_classes else [])]
        train, held_out = photos.split(names, classes, share, model.config.data.split_seed)
        features.see(train)
        rows.append(teach(learned, make(learned, names, train, held_out), how, progress))
        held.append(held_out)
    old = compare(model, learned, old_images, before, source, features)
    if wish.max_drop is not None and old is not None and old.measured and old.drop > wish.max_drop:
        raise ForgettingError(old, wish.max_drop)
    spared = image_set(
        torch.cat([one.pixels[one.rows] for one in held]), torch.cat([one.labels for one in held])
    )
    accuracy = finish(learned, spared, wish.keep_images, rows)
    for row in rows:
        row["old"] = old.as_json() if old is not None else None
    learned.history += rows
    return learned, Extension(new, more, sum(row["train_images"] for row in rows), accuracy, old, rows)


def plan(model: Model, wish: Wish, found: Listing) -> tuple[list[str], list[str]]:
    """Return the new and the known classes among the photographs, or say all that is wrong at once."""
    method, known = model.method, set(model.classes)
    new = [name for name in found.classes if name not in known]
    more = [name for name in found.classes if name in known]
    wrong = []
    if not method.extends:
        wrong.append(f"{method.label} learns all classes at once and cannot be extended; use cofima")
    if more and wish.only_new:
        wrong.append(f"already known, where only new classes are asked for: {', '.join(more)}")
    elif more and method.extends and not method.refines:
        wrong.append(f"{method.label} cannot learn more images of known classes: {', '.join(more)}")
    elif len(more) == 1 and method.extends and not method.refines_one_class:
        wrong.append(f"{method.label} learns nothing from more images of one known class alone: {more[0]}")
    folded = {name.casefold(): name for name in known}
    wrong += [
        f"class '{name}' differs from the known class '{folded[name.casefold()]}' by case only"
        for name in new
        if name.casefold() in folded
    ]
    if wish.max_drop is not None and wish.max_drop < 0:
        wrong.append(f"max_drop = {wish.max_drop:g}: points that may be lost, at least 0")
    if wish.keep_images is not None and wish.keep_images < 0:
        wrong.append(f"keep_images = {wish.keep_images}: must be at least 0")
    if wrong:
        raise problems(f"extending by {wish.photos}", wrong)
    return new, more


def old_class_images(model: Model, wish: Wish, progress: Progress) -> tuple[ImageSet, str]:
    """Return images of old classes to compare on, and where they come from; none where there are none."""
    nothing = image_set(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    if wish.check is None:
        kept = model.images
        return (kept, "kept in the model folder") if kept is not None and len(kept) else (nothing, "")
    found = find_images(wish.check).only("test")
    mine = found.of(model.classes)
    if not mine.files:
        close = did_you_mean(found.classes[0], model.classes[:20])
        raise CofimaError(f"{wish.check}: none of its classes is known to the model{close}")
    photos = mine.read(model.view.form, skip_bad=wish.skip_bad, progress=progress)
    return photos.images(model.classes), f"of {wish.check}"


class FeatureDrift:
    """Features of the new images before they were learned, to see how far the backbone moved them."""

    def __init__(self, old: Model) -> None:
        self.old, self.images = old, list[ImageSet]()

    def see(self, images: ImageSet) -> None:
        """Remember which images were learned."""
        self.images.append(images)

    def between(self, new: Model) -> tuple[Tensor, Tensor]:
        """Return the features of all images seen, by the old and by the new backbone."""
        old, now = ([features_of(model, one) for one in self.images] for model in (self.old, new))
        return torch.cat(old), torch.cat(now)


def compare(
    old: Model, new: Model, images: ImageSet, before: Tensor, source: str, drift: FeatureDrift
) -> Comparison | None:
    """Measure what old classes lost where there are images of them; else estimate it if possible."""
    if len(images):
        return measure(before, answers(new, images, "old classes, after"), images, old.classes, source)
    gaussians = gaussians_of(old)
    return None if gaussians is None else estimate(gaussians, old, new, *drift.between(new))


def finish(model: Model, spared: ImageSet, keep: int | None, rows: list[dict[str, Any]]) -> Accuracy:
    """Measure on held-out images, calibrate on them, and keep as many as were asked for."""
    old = model.images
    both = spared
    if old is not None and len(old):
        both = image_set(
            torch.cat([old.pixels[old.rows], spared.pixels[spared.rows]]),
            torch.cat([old.labels, spared.labels]),
        )
    calibrate(model, both)
    remember_distances(model, both)
    accuracy = accuracy_of(model, spared)
    model.serving["accuracy"] = {"right": accuracy.right, "images": accuracy.images}
    percent = accuracy.percent
    for row in rows:
        row["accuracy"] = None if percent is None else round(percent, 2)
    each = model.serving.get("keep_images", 0) if keep is None else keep
    model.serving["keep_images"] = each
    model.images = first_of_each(both, each)
    return accuracy


def first_of_each(images: ImageSet, each: int) -> ImageSet | None:
    """Return at most ``each`` images of each class, in pixels of their own."""
    chosen: list[int] = []
    for label in images.counts():
        chosen += (images.labels == label).nonzero().flatten()[:each].tolist()
    if not chosen:
        return None
    mine = images.select(torch.tensor(chosen))
    return image_set(mine.pixels[mine.rows], mine.labels)
