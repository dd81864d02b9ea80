"""One stage of learning: a model learns the tasks of a command, and is measured on held-out images.

Where the backbone stays as it is, every image teaches the head, and each is left out to be answered
(exactly, in closed form). Where it is trained, a part of each class is held out: one half may choose, the
other reports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cofima.classifier.calibrate import calibrate, honest_answers, remember_distances
from cofima.classifier.forgetting_check import Moved, moved_features
from cofima.classifier.scoring import Accuracy, features_of, held_out_logits, logits_of, raw_logits
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

KEPT_FEATURES = 20  # images of each class
PENDING = "fine_tuning"  # in the record of a first stage: the second one, which is not done yet


@dataclass(frozen=True)
class Keep:
    """Parts of the images that a model keeps; None keeps as much as before.

    Attributes:
        images: Images of each class.
        features: Keep features, to measure and calibrate later.
    """

    images: int | None = None
    features: bool | None = None

    def refusals(self) -> list[str]:
        """Return what is wrong."""
        few = self.images is not None and self.images < 0
        return [f"keep_images = {self.images}: must be at least 0"] if few else []


KEEP = Keep()


@dataclass(frozen=True, eq=False)
class Part:
    """Images of new classes, or more images of known ones: one task."""

    names: list[str]
    split: Split

    @property
    def held_out(self) -> ImageSet:
        """The held-out images: those to report on, then those that may choose."""
        return join([self.split.report, self.split.choose])

    @property
    def everything(self) -> ImageSet:
        """All images but a test part: each may be left out of a head in closed form to be answered by it."""
        split = self.split
        return join([split.train, split.choose, *([] if split.tested else [split.report])])

    @property
    def single(self) -> Tensor:
        """A mask of those that can be left out: others of their class are there, and no copies of them."""
        images = self.everything
        often = torch.bincount(images.labels)[images.labels] if len(images) else images.labels
        return (often > 1) & ~torch.isin(images.rows, self.split.copied)


@dataclass
class Learned:
    """A model that has learned the parts of a command, and what was measured.

    Attributes:
        rows: The rows of its history that are not in it yet.
        held_out: The held-out images of this command.
        moved: Kept features of old classes, as this model sees them.
        may_choose: A mask of images that may choose, among the model's kept features; of a method that
            predicts from more than features, among the held-out images.
        accuracy: On held-out images of all classes that decided nothing.
        logits: The head's answers to the model's kept features, once they were asked for.
    """

    model: Model
    rows: list[HistoryRow]
    held_out: ImageSet
    moved: Moved | None
    may_choose: Tensor
    accuracy: Accuracy = field(default_factory=lambda: Accuracy({}, {}))
    logits: Tensor | None = None

    def answers(self) -> Tensor:
        """Return the head's answers to the model's kept features, computed once."""
        if self.logits is None:
            self.logits = held_out_logits(self.model, self.model.kept)
        return self.logits

    def finished(self, keep: Keep, pending: Mapping[str, Any] | None = None) -> Model:
        """Return the model as it is saved: with its history, and of held-out images what is to be kept.

        ``pending`` describes the fine-tuning that follows, by which the same command continues it.
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
    """Learn tasks, and compute the features by which they are measured."""
    rows, new = [], no_images(model.width)
    for part in parts:
        rows.append(learn_part(model, part, how, progress, still=still))
        if still:
            new = new.join(_left_out(model, part))
    method, held_out = model.method, concatenate(*(part.held_out for part in parts))
    if not method.sees_features_only:
        return Learned(model, rows, held_out, None, torch.cat([_choosing(part, still) for part in parts]))
    stayed = still or method.frozen_backbone or method.fixed_features
    if not still:
        new = _held_out(model, parts, decided=not stayed and how.patience is not None)
    moved = None
    if before is not None:
        moved = moved_features(before, model, [part.split.train for part in parts], stayed)
        new = moved.held_out().join(new)
    old = 0 if moved is None else len(moved.kept)
    model.held_out = new
    rows_of_old = torch.arange(len(new)) < old
    choosing = torch.cat([rows_of_old[:old], *(_choosing(part, still) for part in parts)]) & ~rows_of_old
    return Learned(model, rows, held_out, moved, choosing | every_other(new.labels, rows_of_old))


def learn_part(
    model: Model, part: Part, how: TrainOptions, progress: Progress, *, still: bool = False
) -> HistoryRow:
    """Learn a task, with early stopping on images that may choose, or with the backbone as it is."""
    task = make_task(model, part, still)
    kind: Kind = "more images" if task.known else "extend" if task.index else "learn"
    progress.expect(len(task.train) if still else expected_work(model, [task], how))
    with progress.stage(f"{model.method.label}: {some(task.names, 3)}"):
        row = learn_task(model, task, kind, train=how, patience=how.patience, still=still)
    split = part.split
    row.held_out = (len(split.report) if split.tested else 0) if still else len(part.held_out)
    return row


def make_task(model: Model, part: Part, still: bool = False) -> Task:
    """Return the task that teaches new classes, or more images of classes that are all known.

    With a ``still`` backbone it teaches held-out images too.
    """
    names = part.names
    known = tuple(sorted(model.classes.index(name) for name in names if name in model.classes))
    start = len(model.classes)
    classes = range(start, start if known else start + len(names))
    train = part.everything if still else part.split.train
    return Task(len(model.tasks), classes, tuple(names), train, part.split.choose, known)


def _left_out(model: Model, part: Part) -> HeldOut:
    """Return the features of all images of a part that the head was just solved from, and of a test part."""
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


def _held_out(model: Model, parts: Sequence[Part], decided: bool) -> HeldOut:
    """Return the features of held-out images; those that may choose have ``decided`` when to stop."""
    images = concatenate(*(part.held_out for part in parts))
    no = torch.zeros(len(images)).bool()
    chose = torch.cat([_choosing(part, still=False) for part in parts]) & decided
    return HeldOut(features_of(model, images), images.labels, chose, no, ~no)


def _choosing(part: Part, still: bool) -> Tensor:
    """Return a mask of the images that may choose, among those that a stage measures with."""
    split = part.split
    if not still:
        return torch.arange(len(part.held_out)) >= len(split.report)
    mask = torch.isin(part.everything.rows, split.choose.rows)[part.single]
    return torch.cat([mask, torch.zeros(len(split.report) if split.tested else 0).bool()])


def measure(learned: Learned, typed: str = "") -> Learned:
    """Calibrate the model on held-out images, and measure it on those that decided nothing.

    ``typed`` is the command, for the history.
    """
    model, kept = learned.model, learned.model.kept
    if model.method.sees_features_only:
        logits, labels = learned.answers(), kept.labels
        fit_to_report = kept.exact & ~kept.chose
        remember_distances(model)
    else:
        images = learned.held_out if model.images is None else concatenate(learned.held_out, model.images)
        model.serving.pop("offsets", None)
        logits, labels = logits_of(model, images), images.labels
        fit_to_report = torch.ones_like(labels, dtype=torch.bool)
        fit_to_report[: len(learned.held_out)] = ~learned.may_choose
    answers = honest_answers(model, logits, labels)
    learned.accuracy = Accuracy.of(answers[fit_to_report], labels[fit_to_report], model.classes)
    calibrate(model, logits, labels)
    model.serving["accuracy"] = {"right": learned.accuracy.right, "images": learned.accuracy.images}
    for row in learned.rows:  # a row has the tasks up to its own
        row.accuracy, row.sizes = learned.accuracy.by_task(model.tasks[: row.task])
        row.command = typed or row.command
    return learned


def chance_right(learned: Learned) -> Tensor:
    """Return the chance that the answer to each kept feature is right, which is 0 or 1 where it is exact."""
    kept, moved = learned.model.kept, learned.moved
    right = (learned.answers().argmax(1) == kept.labels).double()
    if moved is not None and not moved.still:
        old = moved.kept.labels  # they come first
        drawn = [raw_logits(learned.model, features).argmax(1) == old for features in moved.draws()]
        right[: len(old)] = torch.stack(drawn).double().mean(0)
    return right


def held_out_accuracy(model: Model) -> Accuracy | None:
    """Return the accuracy on held-out images that decided nothing, as last measured, or None."""
    kept = model.serving.get("accuracy")
    return None if kept is None else Accuracy(kept["right"], kept["images"])
