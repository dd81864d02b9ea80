"""Photographs become a classifier, with settings that one recipe holds."""

import json
from collections.abc import Sequence
from pathlib import Path

from cofima import config as configs
from cofima import store
from cofima.config import Config
from cofima.data.sources.listing import find_images
from cofima.data.views import INTERPOLATIONS, View
from cofima.errors import CofimaError
from cofima.methods import build
from cofima.models import backbone, lite
from cofima.models.backbone import BackboneFacts
from cofima.models.net import Net
from cofima.progress import SILENT, Progress
from cofima.serve.extend import finish
from cofima.serve.lesson import new_classes, teach
from cofima.store import Model

RECIPE = "learn.yaml"
FOR_PHOTOGRAPHS, EMBEDDED = "tf_efficientnet_lite0", "vit_micro"


def resolve(photos: Path, given: Sequence[str] = ()) -> Config:
    """Return the recipe's configuration for these photographs, with ``key=value`` items laid over it."""
    chosen = {item.partition("=")[0].strip() for item in given}
    default = FOR_PHOTOGRAPHS if lite.installed(FOR_PHOTOGRAPHS) else EMBEDDED
    where = photos if photos.is_dir() else photos.parent
    own = [f"dataset={json.dumps(f'folder:{where.resolve()}')}"]
    own += [] if "backbone" in chosen else [f"backbone={default}"]
    return configs.read(RECIPE, [*own, *given])


def learn_model(
    photos: Path,
    config: Config,
    *,
    keep_images: int = 0,
    skip_bad: bool = False,
    progress: Progress = SILENT,
) -> Model:
    """Learn all classes of a folder (or CSV file) at once; some images are held out to measure with."""
    if keep_images < 0:
        raise CofimaError(f"keep_images = {keep_images}: must be at least 0")
    found = find_images(photos)
    module, facts = backbone.create(config.backbone, config.model, config.seed)
    build(config.method, config.options).check(module)  # before images are read
    view = view_of(facts, config)
    read = found.read(view.form, skip_bad=skip_bad or config.data.skip_bad, progress=progress)
    model = store.attach(config, facts, view, Net(module, facts.features), 1, progress)
    names = sorted({file.class_name for file in read.files})
    train, held_out = read.split(names, names, config.held_out, config.data.split_seed)
    model.data = {
        "name": str(photos),
        "train": len(train),
        "held_out": len(held_out),
        "classes": len(names),
        "split_seed": config.data.split_seed,
    }
    row = teach(model, new_classes(model, names, train, held_out), config.train, progress)
    finish(model, held_out, keep_images, [row])
    model.history.append(row)
    return model


def view_of(facts: BackboneFacts, config: Config) -> View:
    """Prepare images as the backbone expects; crop and mirror training images as photographs allow."""
    return View(
        size=facts.size,
        stored=facts.stored,
        mean=facts.mean,
        std=facts.std,
        flip=config.data.flip is not False,
        crop=0.5 if config.data.crop is None else config.data.crop,
        interpolation=facts.interpolation if facts.interpolation in INTERPOLATIONS else "bicubic",
    )
