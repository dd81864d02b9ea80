"""One stage of learning: a model learns the tasks of a command, and is measured on held-out images.

With a frozen backbone the head is fitted on every image, and each image is predicted by leave-one-out
(exactly, in closed form). If the backbone is trained, a part of each class is held out: one half selects
(early stopping, which stage to keep), and accuracy is reported on the other.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cofima.classifier.calibrate import calibrate, honest_answers, remember_distances
from cofima.classifier.forgetting_check import Moved, moved_features
from cofima.classifier.scoring import Accuracy, features_of, held_out_logits, logits_of, raw_logits
from cofima.core.errors import CofimaWarning
from cofima.core.progress import Progress
from cofima.core.wording import some
from cofima.data.image_set import ImageSet, concatenate, join
from cofima.data.sources.listing import Split
from cofima.data.splits import every_other
from cofima.data.stream import Task
from cofima.experiment.run import expected_work, learn_task
from cofima.methods.components.replay import first_of_each
from cofima.store.held_out import HeldOut, no_images
from cofima.store.history import HistoryRow, Kind
from cofima.store.model import Model
from cofima.training.options import TrainOptions

KEPT_FEATURES = 20  # stored features per class
SAME = 1e-4  # relative to the largest value: features of the same photograph differ by less
PENDING = "fine_tuning"  # key in the record of a first stage: the second one, still to be done


@dataclass(frozen=True)
class Keep:
    """Held-out images and features to store with a model; None means as before.

    Attributes:
        images: Number of images per class.
        features: Store features, for later measurements and calibration.
    """

    images: int | None = None
    features: bool | None = None

    def refusals(self) -> list[str]:
        """Return the problems of these values."""
        few = self.images is not None and self.images < 0
        return [f"keep_images = {self.images}: must be at least 0"] if few else []


KEEP = Keep()


@dataclass(frozen=True, eq=False)
class Part:
    """One task: images of new classes, or more images of known ones."""

    names: list[str]
    split: Split

    @property
    def held_out(self) -> ImageSet:
        """The held-out images: those for reporting, then those for selection."""
        return join([self.split.report, self.split.choose])

    @property
    def everything(self) -> ImageSet:
        """All images but a test part: those that a closed-form head is fitted on, with leave-one-out."""
        split = self.split
        return join([split.train, split.choose, *([] if split.tested else [split.report])])

    @property
    def single(self) -> Tensor:
        """Mask of the images in ``everything`` that can be left out.

        The only image of a class cannot, nor can an image with a copy: the copy would still give it away.
        """
        images = self.everything
        often = torch.bincount(images.labels)[images.labels] if len(images) else images.labels
        return (often > 1) & ~torch.isin(images.rows, self.split.copied)


@dataclass
class Learned:
    """A model that has learned the tasks of a command, with its measurements.

    Attributes:
        model: The model; its history lacks ``rows`` until :meth:`finished`.
        rows: New rows of the history.
        held_out: The held-out images of this command.
        moved: Stored features of old classes, mapped to this model's backbone.
        may_choose: Mask of the selection images among the model's stored features, or among ``held_out``
            for a method that predicts from more than features.
        accuracy: Accuracy on held-out images of all classes that were not used for selection.
        logits: Cached logits of the model's stored features; see :meth:`answers`.
    """

    model: Model
    rows: list[HistoryRow]
    held_out: ImageSet
    moved: Moved | None
    may_choose: Tensor
    accuracy: Accuracy = field(default_factory=lambda: Accuracy({}, {}))
    logits: Tensor | None = None

    def answers(self) -> Tensor:
        """Return the head's logits of the model's stored features, computed once."""
        if self.logits is None:
            self.logits = held_out_logits(self.model, self.model.kept)
        return self.logits

    def finished(self, keep: Keep, pending: Mapping[str, Any] | None = None) -> Model:
        """Return the model to save, with its history and the held-out images and features to store.

        ``pending`` describes the fine-tuning that follows, so that the same command can complete it later.
        """
        model = self.model
        serving = {key: value for key, value in model.serving.items() if key != PENDING}
        serving |= {} if pending is None else {PENDING: dict(pending)}
        each = serving.get("keep_images", 0) if keep.images is None else keep.images
        both = concatenate(*([] if model.images is None else [model.images]), self.held_out)
        first = first_of_each(both.labels, each)
        images = concatenate(both.select(first)) if len(first) else None
        wanted = serving.get("keep_features", True) if keep.features is None else keep.features
        features = model.kept.at_most(KEPT_FEATURES) if wanted else None
        serving |= {"keep_images": each, "keep_features": wanted}
        rows = [row.model_copy() for row in self.rows]
        rows[-1].kept_features = 0 if features is None else len(features)
        history = [*model.history, *rows]
        return replace(model, history=history, serving=serving, images=images, held_out=features)


def learn_stage(
    model: Model,
    before: Model | None,
    parts: Sequence[Part],
    how: TrainOptions,
    progress: Progress,
    *,
    still: bool = False,
) -> Learned:
    """Learn tasks, and compute the features on which they are measured.

    With ``still``, the backbone stays frozen.
    """
    rows, new = [], no_images(model.width)
    for part in parts:
        rows.append(learn_part(model, part, how, progress, still=still))
        if still:
            found = _left_out(model, part)
            if before is not None:
                _warn_of_repeats(before, found)
            new = new.join(found)
    method, held_out = model.method, concatenate(*(part.held_out for part in parts))
    if not method.sees_features_only:
        return Learned(model, rows, held_out, None, torch.cat([_choosing(part, still) for part in parts]))
    stayed = still or method.frozen_backbone or method.fixed_features  # features of old classes stay valid
    if not still:
        new = _held_out(model, parts, decided=not stayed and how.patience is not None)
    moved = None
    if before is not None:
        moved = moved_features(before, model, [part.split.train for part in parts], stayed)
        new = moved.held_out().join(new)
    old = 0 if moved is None else len(moved.kept)
    model.held_out = new
    # Stored features have no split of their own: half of each old class selects, the other half reports.
    rows_of_old = torch.arange(len(new)) < old
    choosing = torch.cat([rows_of_old[:old], *(_choosing(part, still) for part in parts)]) & ~rows_of_old
    return Learned(model, rows, held_out, moved, choosing | every_other(new.labels, rows_of_old))


def learn_part(
    model: Model, part: Part, how: TrainOptions, progress: Progress, *, still: bool = False
) -> HistoryRow:
    """Learn a task, with early stopping on the selection images, or with a frozen backbone (``still``)."""
    task = make_task(model, part, still)
    kind: Kind = "more images" if task.known else "extend" if task.index else "learn"
    progress.expect(len(task.train) if still else expected_work(model, [task], how))
    with progress.stage(f"{model.method.label}: {some(task.names, 3)}"):
        row = learn_task(model, task, kind, train=how, patience=how.patience, still=still)
    split = part.split
    row.held_out = (len(split.report) if split.tested else 0) if still else len(part.held_out)
    return row


def make_task(model: Model, part: Part, still: bool = False) -> Task:
    """Return the task of a part: new classes, or more images of classes that are all known.

    With a ``still`` backbone it trains on held-out images too, as the head predicts them by leave-one-out.
    """
    names = part.names
    known = tuple(sorted(model.classes.index(name) for name in names if name in model.classes))
    start = len(model.classes)
    classes = range(start, start if known else start + len(names))
    train = part.everything if still else part.split.train
    return Task(len(model.tasks), classes, tuple(names), train, part.split.choose, known)


def _left_out(model: Model, part: Part) -> HeldOut:
    """Return the features of the images that the closed-form head was just fitted on, and of a test part."""
    images, features = part.everything, model.method.remembered
    assert features is not None
    features, labels = features[part.single], images.labels[part.single]
    no = torch.zeros(len(labels)).bool()
    found = HeldOut(features, labels, no, ~no, ~no)
    if part.split.tested:
        test = part.split.report
        no = torch.zeros(len(test)).bool()
        found = found.join(HeldOut(features_of(model, test), test.labels, no, no, ~no))
    return found


def _warn_of_repeats(before: Model, found: HeldOut) -> None:
    """Say that photographs were learned before, by the features that are kept of some of them."""
    kept = before.kept.select(before.kept.exact)
    again = torch.zeros(len(found)).bool()
    for feature, label in zip(kept.features, kept.labels, strict=True):
        mine = (found.labels == label).nonzero().flatten()
        apart = (found.features[mine] - feature).abs().amax(1)  # the last bits depend on the rest of a batch
        again[mine[apart <= SAME * feature.abs().max()]] = True
    if again.any():
        names = some([before.classes[label] for label in torch.unique(found.labels[again]).tolist()])
        least = f"at least {int(again.sum()):,}, of {names}"
        warnings.warn(
            f"photographs that were learned before are among these ({least}): learned "
            "twice, they make the accuracy look too high. cofima undo brings the model back; then "
            "give a folder with the new photographs alone",
            CofimaWarning,
            stacklevel=2,
        )


def _held_out(model: Model, parts: Sequence[Part], decided: bool) -> HeldOut:
    """Return the features of held-out images; ``decided`` says if the selection images stopped training."""
    images = concatenate(*(part.held_out for part in parts))
    no = torch.zeros(len(images)).bool()
    chose = torch.cat([_choosing(part, still=False) for part in parts]) & decided
    return HeldOut(features_of(model, images), images.labels, chose, no, ~no)


def _choosing(part: Part, still: bool) -> Tensor:
    """Return a mask of the selection images among those that a stage is measured on."""
    split = part.split
    if not still:
        return torch.arange(len(part.held_out)) >= len(split.report)
    mask = torch.isin(part.everything.rows, split.choose.rows)[part.single]
    return torch.cat([mask, torch.zeros(len(split.report) if split.tested else 0).bool()])


def measure(learned: Learned, typed: str = "") -> Learned:
    """Calibrate the model on held-out images, and measure it on those not used for selection.

    ``typed`` is the command line, for the history.
    """
    model, kept = learned.model, learned.model.kept
    if model.method.sees_features_only:
        logits, labels = learned.answers(), kept.labels
        fit_to_report = kept.exact & ~kept.chose
        remember_distances(model)
    else:
        images = learned.held_out if model.images is None else concatenate(learned.held_out, model.images)
        model.serving.pop("offsets", None)  # logits_of would add those of the previous calibration
        logits, labels = logits_of(model, images), images.labels
        fit_to_report = torch.ones_like(labels, dtype=torch.bool)
        fit_to_report[: len(learned.held_out)] = ~learned.may_choose
    answers = honest_answers(model, logits, labels)
    learned.accuracy = Accuracy.of(answers[fit_to_report], labels[fit_to_report], model.classes)
    calibrate(model, logits, labels)
    model.serving["accuracy"] = {"right": learned.accuracy.right, "images": learned.accuracy.images}
    taught = kept.taught & fit_to_report if model.method.sees_features_only else kept.taught[:0]
    model.serving["left_out"] = int(taught.sum())
    for row in learned.rows:  # a row covers the tasks up to its own
        row.accuracy, row.sizes = learned.accuracy.by_task(model.tasks[: row.task])
        row.command = typed or row.command
    return learned


def chance_right(learned: Learned) -> Tensor:
    """Return the probability that each stored feature is classified correctly: 0 or 1 where it is exact.

    Features mapped to a changed backbone are uncertain; theirs is the mean over draws of the mapping error.
    """
    kept, moved = learned.model.kept, learned.moved
    right = (learned.answers().argmax(1) == kept.labels).double()
    if moved is not None and not moved.still:
        old = moved.kept.labels  # old classes come first
        drawn = [raw_logits(learned.model, features).argmax(1) == old for features in moved.draws()]
        right[: len(old)] = torch.stack(drawn).double().mean(0)
    return right


def why_unseen(model: Model) -> str:
    """Return why the images that the accuracy is reported on are new to the model."""
    accuracy = held_out_accuracy(model)
    images = 0 if accuracy is None else sum(accuracy.images.values())
    left_out = model.serving.get("left_out", int(model.kept.taught.sum()))  # also where no feature is kept
    if not left_out:
        return "held out, and nothing was decided by them"
    if left_out >= images:
        return "each judged by all others"
    return f"{left_out:,} of them each judged by all others, {images - left_out:,} held out"


def held_out_accuracy(model: Model) -> Accuracy | None:
    """Return the last measured accuracy on held-out images not used for selection, or None."""
    kept = model.serving.get("accuracy")
    return None if kept is None else Accuracy(kept["right"], kept["images"])
