"""Forecast of a grid: images, weights and estimated time of each cell, without training.

The time is the number of passes that a method needs, times the time of a pass on this machine, which is
measured once and cached.
"""

import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import timm
import torch
from pydantic import TypeAdapter, ValidationError

from cofima import methods
from cofima.core.atomic import cache_folder, write_text
from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.data import datasets, sources
from cofima.data.stream import increments
from cofima.experiment.grid.cells import name
from cofima.methods.components.cost import Plan
from cofima.models import backbone, registry
from cofima.models.registry import ALIASES
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.training import device
from cofima.training.depthwise import faster_gradients

SPEEDS = "speed.json"  # in the cache folder
SMALL = 20_000_000  # parameters; larger networks are timed with fewer images on a CPU


@dataclass(frozen=True)
class Forecast:
    """Forecast of one cell.

    Attributes:
        config: The cell's configuration.
        folder: Its folder.
        done: True if it is finished.
        data: Folder of the images, or a note that they are missing.
        missing: The expected files, if the images are missing.
        images: Numbers of training and test images, if known.
        tasks: Number of tasks, if known.
        weights: Source of the backbone's weights.
        seconds: Estimated time in the network, if known.
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
class DatasetSize:
    """Facts about a dataset that are known without reading its images."""

    train: int
    test: int
    classes: int
    where: str
    missing: str = ""


@dataclass(frozen=True)
class Speed:
    """Seconds per image: a training step, and a forward pass."""

    step: float
    forward: float


_SPEEDS = TypeAdapter(dict[str, Speed])


def forecast(cells: Sequence[Config], out: Path, jobs: int, progress: Progress = SILENT) -> list[Forecast]:
    """Look up data and weights of every cell, and time each backbone once; nothing is downloaded."""
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


def _images(dataset: str, options: str) -> DatasetSize | None:
    how = datasets.DataOptions.model_validate_json(options)
    absent = datasets.missing(dataset, how)
    if absent and dataset in sources.names():
        known = sources.info(dataset)
        train, test = next(iter(known.variants.values()))
        return DatasetSize(train, test, known.classes, "missing", absent)
    if absent:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = datasets.find(dataset, how)
    except CofimaError as error:
        return DatasetSize(0, 0, 0, "cannot be read", str(error))
    where = source.facts.get("folder", "in the package")
    return DatasetSize(len(source.train), len(source.test), len(source.class_names), str(where))


def _tasks(config: Config, classes: int) -> int | None:
    how = config.stream
    if how.groups is not None:
        return len(how.groups)
    return len(increments(classes, how.base_classes, how.increment)) if how.base_classes <= classes else None


def _counts(config: Config, images: DatasetSize) -> tuple[int, int]:
    """Return the numbers of training and test images, after held-out split and limits per class."""
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
    cost = method.cost(Plan(config.train.epochs, *counts, tasks, config.train.head_init == "lda"))
    return cost.steps * speed.step + cost.forward * speed.forward


def _weights() -> dict[str, str]:
    """Return the sources of the weights of known backbones, by alias and by timm name."""
    return {key: entry.where for entry in backbone.available() for key in (entry.name, entry.timm)}


def _where(config: Config, known: dict[str, str]) -> str:
    if config.model.checkpoint is not None:
        there = config.model.checkpoint.is_file()
        return str(config.model.checkpoint) if there else f"missing: {config.model.checkpoint}"
    if not config.model.pretrained:
        return "random"
    return known.get(config.backbone) or known.get(registry.resolve(config.backbone), "hub")


def measure(config: Config, jobs: int = 1, progress: Progress = SILENT) -> Speed | None:
    """Return the speed of a backbone with ``jobs`` concurrent cells; None if it cannot be built here."""
    size = _input_size(config)
    if size is None:
        return None
    where = device.choose(config.device)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    name = f"{registry.resolve(config.backbone).partition('.')[0]}, {size} px, {config.train.precision}"
    key = f"{name}, {_machine(where)}, torch {torch.__version__}, {threads} thread(s)"
    known = _read_speeds()
    if key not in known:
        progress.say(f"measuring {name}")
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            known = _read_speeds() | {key: _measure(config, size, where)}
        finally:
            torch.set_num_threads(before)
        write_text(cache_folder() / SPEEDS, _SPEEDS.dump_json(known, indent=1).decode() + "\n")
    return known[key]


def _measure(config: Config, size: int, where: torch.device) -> Speed:
    """Time a few passes with random weights, as their values do not affect the time."""
    net = backbone.build_empty(config.backbone, size).to(where)
    large = sum(weight.numel() for weight in net.parameters()) > SMALL
    count = min(config.train.batch_size, 128 if where.type == "cuda" else 2 if large else 16)
    images = torch.randn(count, 3, size, size, device=where)
    half = torch.autocast(where.type, torch.bfloat16, enabled=config.train.precision == "bf16")
    faster = faster_gradients(net)  # as in the training loop

    def step() -> None:
        with half, faster:
            value = net(images).float().square().mean()
        torch.autograd.backward(value)

    def forward() -> None:
        with torch.inference_mode(), half:
            net(images)

    net.train()
    seconds = _time(step, where)
    net.eval()
    return Speed(seconds / count, _time(forward, where) / count)


def _time(work: Callable[[], None], where: torch.device, rounds: int = 3) -> float:
    """Return the shortest time of several rounds, after a warm-up."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _input_size(config: Config) -> int | None:
    """Return the input size in pixels, or None for a backbone that is only on the hub."""
    alias = ALIASES.get(config.backbone)
    chosen = config.model.img_size or (alias.size if alias else None)
    full = registry.resolve(config.backbone)
    if not timm.is_model(full.partition(".")[0]):
        return None
    if chosen is not None:
        return chosen
    known = timm.get_pretrained_cfg(full, allow_unregistered=True)
    return None if known is None else int(known.input_size[-1])


def _machine(where: torch.device) -> str:
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"{platform.node()} {platform.machine()} {os.cpu_count()} cores"


def _read_speeds() -> dict[str, Speed]:
    """Return the cached speeds; a file of another format counts as empty."""
    try:
        return _SPEEDS.validate_json((cache_folder() / SPEEDS).read_bytes())
    except (OSError, ValidationError, CofimaError):
        return {}
