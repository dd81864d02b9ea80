"""A classifier of photographs, learned with the settings of one recipe."""

import json
from collections.abc import Sequence
from pathlib import Path

from cofima.classifier.calibrate import calibrate, remember_distances
from cofima.classifier.scoring import Accuracy, accuracy_of
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.data.image_set import ImageSet, concatenate
from cofima.data.sources.listing import find_images
from cofima.data.stream import Task
from cofima.experiment import config as configs
from cofima.experiment.run import learn_task
from cofima.experiment.stream import make_view
from cofima.methods import build
from cofima.methods.components.replay import first_of_each
from cofima.models import backbone, efficientnet_lite
from cofima.models.net import Net
from cofima.store.config import Config
from cofima.store.history import HistoryRow, Kind
from cofima.store.model import Model, attach
from cofima.training.options import TrainOptions

RECIPE = "learn.yaml"
FOR_PHOTOGRAPHS, EMBEDDED = "tf_efficientnet_lite0", "vit_micro"
CROP = 0.5  # least share of a photograph that a random training crop keeps, unless data.crop says it


def default_backbone() -> str:
    """Return the backbone for photographs where its weights are installed, else the embedded one."""
    return FOR_PHOTOGRAPHS if efficientnet_lite.installed(FOR_PHOTOGRAPHS) else EMBEDDED


def resolve(photos: Path, given: Sequence[str] = ()) -> Config:
    """Return the recipe's configuration for these photographs, with ``key=value`` items laid over it."""
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
    """Learn all classes of a folder (or CSV file) at once; some images are held out to measure with."""
    if keep_images < 0:
        raise CofimaError(f"keep_images = {keep_images}: must be at least 0")
    found = find_images(photos)
    model = empty_model(config, progress)  # before images are read
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
    build(config.method, config.options).check(module)
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
    """Learn a task whose test images were held out to decide when to stop."""
    kind: Kind = "more images" if task.known else "extend" if task.index else "learn"
    names = ", ".join(task.names[:3]) + (", ..." if task.taught > 3 else "")
    with progress.stage(f"{model.method.label}: {names}"):
        row = learn_task(model, task, kind, train=how, patience=how.patience)
    row.held_out = len(task.test)
    return row


def finish(model: Model, spared: ImageSet, keep: int | None, rows: Sequence[HistoryRow]) -> Accuracy:
    """Measure on held-out images, calibrate on them, and keep as many as were asked for."""
    both = spared if model.images is None else concatenate(model.images, spared)
    calibrate(model, both)
    remember_distances(model, both)
    accuracy = accuracy_of(model, spared)
    model.serving["accuracy"] = {"right": accuracy.right, "images": accuracy.images}
    for row in rows:  # the tasks that were seen when it was learned
        row.accuracy, row.sizes = accuracy.by_task(model.tasks[: row.task])
    each = model.serving.get("keep_images", 0) if keep is None else keep
    model.serving["keep_images"] = each
    kept = first_of_each(both.labels, each)
    model.images = concatenate(both.select(kept)) if len(kept) else None
    return accuracy
