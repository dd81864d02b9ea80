"""What a grid would need: its images, its weights, and its time on this machine."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.data import datasets, sources
from cofima.data.stream import increments
from cofima.experiment.grid.cells import name
from cofima.experiment.grid.speed import Speed, measure
from cofima.methods.components.cost import Plan
from cofima.models import backbone, registry
from cofima.store import model_folder
from cofima.store.config import Config


@dataclass(frozen=True)
class Forecast:
    """One cell before it is learned.

    Attributes:
        data: Where its images are, or that they are missing.
        missing: What is expected where, if the images are not here.
        images: Training and test images, as far as they are known.
        weights: Where the backbone's weights are.
        seconds: What the network may take, if that is known.
    """

    config: Config
    folder: Path
    done: bool
    data: str
    missing: str
    images: tuple[int, int] | None
    tasks: int | None
    weights: str
    seconds: float | None


@dataclass(frozen=True)
class Images:
    """What is known of a dataset without reading its images."""

    train: int
    test: int
    classes: int
    where: str
    missing: str = ""


def forecast(cells: Sequence[Config], out: Path, jobs: int, progress: Progress = SILENT) -> list[Forecast]:
    """Look for what every cell needs, and measure each backbone once; nothing is learned or fetched."""
    found, look, weights = [], cache(_images), _weights()
    for config in progress.track(cells, len(cells), "cells"):
        images = look(config.dataset, config.data.model_dump_json())
        speed = measure(config, jobs, progress)
        tasks = None if images is None else _tasks(config, images.classes)
        counts = None if images is None else _counts(config, images)
        folder = out / name(config)
        found.append(
            Forecast(
                config,
                folder,
                model_folder.finished(folder),
                "not known" if images is None else images.where,
                "" if images is None else images.missing,
                counts,
                tasks,
                _where(config, weights),
                _seconds(config, counts, tasks, speed),
            )
        )
    return found


def _images(dataset: str, options: str) -> Images | None:
    how = datasets.DataOptions.model_validate_json(options)
    absent = datasets.missing(dataset, how)
    if absent and dataset in sources.names():
        known = sources.info(dataset)
        train, test = next(iter(known.variants.values()))
        return Images(train, test, known.classes, "missing", absent)
    if absent:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = datasets.find(dataset, how)
    except CofimaError as error:
        return Images(0, 0, 0, "cannot be read", str(error))
    where = source.facts.get("folder", "in the package")
    return Images(len(source.train), len(source.test), len(source.class_names), str(where))


def _tasks(config: Config, classes: int) -> int | None:
    how = config.stream
    if how.groups is not None:
        return len(how.groups)
    return len(increments(classes, how.base_classes, how.increment)) if how.base_classes <= classes else None


def _counts(config: Config, images: Images) -> tuple[int, int]:
    """Return how many images are trained and tested on."""
    train, test = images.train, images.test
    if config.val_fraction:
        test = round(config.val_fraction * train)
        train -= test
    if config.data.max_train_per_class is not None:
        train = min(train, config.data.max_train_per_class * images.classes)
    if config.data.max_test_per_class is not None:
        test = min(test, config.data.max_test_per_class * images.classes)
    return train, test


def _seconds(
    config: Config, counts: tuple[int, int] | None, tasks: int | None, speed: Speed | None
) -> float | None:
    if counts is None or tasks is None or speed is None:
        return None
    method = methods.build(config.method, config.options)
    cost = method.cost(Plan(config.train.epochs, *counts, tasks))
    return cost.steps * speed.step + cost.forward * speed.forward


def _weights() -> dict[str, str]:
    """Return where the weights of known backbones are, by all their names."""
    return {key: entry.where for entry in backbone.available() for key in (entry.name, entry.timm)}


def _where(config: Config, known: dict[str, str]) -> str:
    if config.model.checkpoint is not None:
        there = config.model.checkpoint.is_file()
        return str(config.model.checkpoint) if there else f"missing: {config.model.checkpoint}"
    if not config.model.pretrained:
        return "random"
    return known.get(config.backbone) or known.get(registry.resolve(config.backbone), "hub")
