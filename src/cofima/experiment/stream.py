"""The stream of tasks and the image preprocessing of a configuration."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.data import datasets, transforms
from cofima.data.stream import Stream, from_groups, split
from cofima.data.transforms import View
from cofima.methods import build
from cofima.models.info import BackboneFacts
from cofima.store.config import Config


def load_stream(config: Config, facts: BackboneFacts, progress: Progress = SILENT) -> Stream:
    """Load the images and split them into the tasks that the method learns."""
    pixel_format = make_view(config, facts).pixel_format
    dataset = datasets.load(config.dataset, pixel_format, options=config.data, progress=progress)
    how = config.stream
    if how.groups is not None:
        stream = from_groups(dataset, how.groups)
    else:
        fixed = dataset.facts.get("class_order") == "given"
        seed = (-1 if fixed else config.seed) if how.order_seed is None else how.order_seed
        stream = split(dataset, how.base_classes, how.increment, None if seed < 0 else seed)
    if config.val_fraction:
        stream = stream.held_out(config.val_fraction, config.data.split_seed)
    for part in ("train", "test"):
        if per_class := getattr(config.data, f"max_{part}_per_class"):
            stream = stream.limited(part, per_class, config.data.split_seed)
    without = [f"task {task.index + 1} has no test images" for task in stream if not len(task.test)]
    if without:
        raise problems(f"dataset {config.dataset}", without)
    return build(config.method, config.options).stream(stream)


def stream_view(config: Config, facts: BackboneFacts, stream: Stream) -> View:
    """Return the preprocessing of a stream, with its augmentation and the size of its stored images."""
    view = make_view(config, facts, stream.flip, stream.crop)
    stored = tuple(stream[0].train.pixels.shape[1:])
    if stored == view.pixel_format.shape:
        return view
    _, height, width = stored
    return replace(view, shape=(height, width))


def make_view(config: Config, facts: BackboneFacts, flip: bool = False, crop: float = 1.0) -> View:
    """Return the preset's preprocessing for a backbone; ``data.flip`` and ``data.crop`` override it.

    ``flip`` and ``crop`` are the dataset's augmentation, used unless the configuration sets them.
    """
    interpolation = "bilinear" if facts.interpolation == "bilinear" else "bicubic"  # torch has only these
    own = View(facts.size, facts.stored, facts.mean, facts.std, flip, crop, interpolation)
    preset = transforms.choose_preset(config.data.preset, config.dataset)
    view = transforms.preset_view(preset, config.dataset, own)
    return transforms.override(view, config.data.flip, config.data.crop)


def refuse_other_images(before: dict[str, Any], now: dict[str, Any], dataset: str, folder: Path) -> None:
    """Raise if the dataset differs from the one that the run was trained on."""
    for key in ("fingerprint", "split_hash"):
        if key in before and before[key] != now.get(key):
            raise CofimaError(
                f"the images of {dataset} are not those that {folder} has learned from "
                f"({key} {now.get(key)}, before {before[key]})"
            )
