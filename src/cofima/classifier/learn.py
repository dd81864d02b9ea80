"""Learn a classifier of photographs, and extend it without the old images.

Both hold images out, learn by :func:`cofima.experiment.run.learn_task`, and measure and calibrate the result.
An extension works on a copy, so the old model stays as it is until the new one is complete and checked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from cofima.data.image_set import ImageSet, concatenate
from cofima.data.sources.listing import Listing, find_images
from cofima.data.stream import Task
from cofima.experiment import config as configs
from cofima.experiment.recipes.layers import override
from cofima.experiment.run import learn_task
from cofima.experiment.stream import make_view
from cofima.methods import build
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
    """Return the backbone for photographs where its weights are installed, else the embedded one."""
    return FOR_PHOTOGRAPHS if efficientnet_lite.installed(FOR_PHOTOGRAPHS) else EMBEDDED


def resolve(photos: Path, given: Sequence[str] = ()) -> Config:
    """Return the configuration of the recipe for these photographs, changed by ``key=value`` items."""
    chosen = {item.partition("=")[0].strip() for item in given}
    where = photos if photos.is_dir() else photos.parent
    own = [f"dataset={json.dumps(f'folder:{where.resolve()}')}"]
    own += [] if "backbone" in chosen else [f"backbone={default_backbone()}"]
    return configs.read(RECIPE, [*own, *given])


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
    row = learn_held_out(model, new_classes(model, names, train, held_out), config.train, progress)
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


def new_classes(model: Model, names: Sequence[str], train: ImageSet, held_out: ImageSet) -> Task:
    """Return the task that teaches new classes."""
    start = len(model.classes)
    return Task(len(model.tasks), range(start, start + len(names)), tuple(names), train, held_out)


def more_images(model: Model, names: Sequence[str], train: ImageSet, held_out: ImageSet) -> Task:
    """Return the task that teaches more images of known classes."""
    count = len(model.classes)
    known = tuple(sorted(model.classes.index(name) for name in names))
    return Task(len(model.tasks), range(count, count), tuple(names), train, held_out, known)


def learn_held_out(model: Model, task: Task, how: TrainOptions, progress: Progress) -> HistoryRow:
    """Learn a task with early stopping on its held-out images, which are its test images."""
    kind: Kind = "more images" if task.known else "extend" if task.index else "learn"
    names = ", ".join(task.names[:3]) + (", ..." if task.taught > 3 else "")
    with progress.stage(f"{model.method.label}: {names}"):
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


@dataclass(frozen=True)
class ExtendRequest:
    """The request of an extension; None means not given.

    Attributes:
        check: Images of old classes on which to measure their loss of accuracy.
        max_drop: Points that old classes may lose on average.
        keep_images: Held-out images of each class to keep in the model.
        only_new: Refuse classes that are known already.
        skip_unreadable: Leave unreadable images out.
    """

    photos: Path
    check: Path | None = None
    max_drop: float | None = None
    keep_images: int | None = None
    only_new: bool = False
    skip_unreadable: bool = False


def extend(
    model: Model, request: ExtendRequest, how: TrainOptions, progress: Progress = SILENT
) -> tuple[Model, Extension]:
    """Return a copy of the model that has also learned the photographs, and the outcome."""
    found = find_images(request.photos)
    new, more = plan(model, request, found)
    old_images, source = old_class_images(model, request.check, request.skip_unreadable, progress)
    photos = found.read(model.view.pixel_format, skip_unreadable=request.skip_unreadable, progress=progress)
    check = ForgettingCheck(model, old_images, source)
    share = model.config.val_fraction or HELD_OUT
    learned = copy_model(model, progress)
    rows, held = [], []
    for names, make in ((more, more_images), (new, new_classes)):
        if not names:
            continue
        classes = [*learned.classes, *(new if make is new_classes else [])]
        train, held_out = photos.split(names, classes, share, model.config.data.split_seed)
        rows.append(learn_held_out(learned, make(learned, names, train, held_out), how, progress))
        held.append(held_out)
        check.learned.append(train)
    old = check.compare(learned)
    if request.max_drop is not None and old is not None and old.measured and old.drop > request.max_drop:
        raise ForgettingError(old, request.max_drop)
    accuracy = finish(learned, concatenate(*held), request.keep_images, rows)
    for row in rows:
        row.old = None if old is None else old.recorded()
    learned.history += rows
    return learned, Extension(new, more, sum(map(len, check.learned)), accuracy, old, rows)


def plan(model: Model, request: ExtendRequest, found: Listing) -> tuple[list[str], list[str]]:
    """Return the new and the known classes of the photographs; raise with every problem at once."""
    method, known = model.method, set(model.classes)
    new = [name for name in found.classes if name not in known]
    more = [name for name in found.classes if name in known]
    wrong = []
    if not method.can_extend:
        wrong.append(f"{method.label} learns all classes at once and cannot be extended; use cofima")
    if more and request.only_new:
        wrong.append(f"already known, where only new classes are asked for: {', '.join(more)}")
    elif more and method.can_extend and not method.can_refine:
        wrong.append(f"{method.label} cannot learn more images of known classes: {', '.join(more)}")
    elif len(more) == 1 and method.can_extend and not method.can_refine_one_class:
        wrong.append(f"{method.label} learns nothing from more images of one known class alone: {more[0]}")
    folded = {name.casefold(): name for name in known}
    wrong += [
        f"class '{name}' differs from the known class '{folded[name.casefold()]}' by case only"
        for name in new
        if name.casefold() in folded
    ]
    if request.max_drop is not None and request.max_drop < 0:
        wrong.append(f"max_drop = {request.max_drop:g}: points that may be lost, at least 0")
    if request.keep_images is not None and request.keep_images < 0:
        wrong.append(f"keep_images = {request.keep_images}: must be at least 0")
    if wrong:
        raise problems(f"extending by {request.photos}", wrong)
    return new, more


def train_options(old: TrainOptions, epochs: int | None, given: Sequence[str]) -> TrainOptions:
    """Return the model's training options, changed by the items of this extension."""
    wrong = [item for item in given if not item.startswith("train.")]
    if wrong:
        raise CofimaError(f"an extension takes train.key=value items only, not {', '.join(wrong)}")
    values = override({"train": old.model_dump()}, given)["train"]
    if epochs is not None:
        values |= {"epochs": epochs, "milestones": None}
    return configs.check({"train": values}, "the settings of this extension").train
