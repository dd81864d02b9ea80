"""From a configuration to a finished run; the same call continues one that was cut off."""

from pathlib import Path

from cofima import store
from cofima.config import Config, difference
from cofima.data import datasets
from cofima.data.stream import Stream, from_groups, split
from cofima.data.views import INTERPOLATIONS, View
from cofima.errors import CofimaError, problems
from cofima.experiment.run import run
from cofima.methods import build
from cofima.models import backbone
from cofima.models.backbone import BackboneFacts
from cofima.models.net import Net
from cofima.progress import SILENT, Progress
from cofima.store import Model, attach
from cofima.training import device

FREE = ("device", "keep_checkpoints", "data.root")  # may differ when a run is continued


def launch(config: Config, folder: Path, progress: Progress = SILENT) -> Model:
    """Learn what ``config`` says into ``folder``, from where it was cut off if it was.

    A finished run is returned as it is. A folder that holds a run of another configuration, or of
    other images, is refused and left alone.
    """
    device.choose(config.device)
    started = store.current(folder) is not None
    model = store.load(folder, where=config.device, progress=progress) if started else None
    if model is not None:
        _refuse_change(model.config, config, folder)
        if any("kind" in row for row in model.history):
            raise CofimaError(f"{folder} is in use (cofima history {folder}): a run cannot continue it")
        if len(model.tasks) >= model.planned:
            progress.say(f"done: {folder} has learned all {model.planned} tasks")
            return model
        progress.say(f"continuing {folder} after task {len(model.tasks)} of {model.planned}")
    return _learn(config, model, folder, progress)


def _learn(config: Config, model: Model | None, folder: Path, progress: Progress) -> Model:
    store.refuse_place(folder)
    module, facts = (
        (None, model.backbone) if model else backbone.create(config.backbone, config.model, config.seed)
    )
    if module is not None:
        build(config.method, config.options).check(module)  # before images are read
    stream = load_stream(config, facts, progress)
    if model is None:
        assert module is not None
        view = make_view(facts, stream, config)
        model = attach(config, facts, view, Net(module, facts.features), len(stream), progress)
        model.data = {"name": config.dataset} | stream.facts
    elif model.data.get("fingerprint") != stream.facts.get("fingerprint"):
        raise CofimaError(
            f"the images of {config.dataset} are not those that {folder} has learned from "
            f"(fingerprint {stream.facts.get('fingerprint')}, before {model.data.get('fingerprint')})"
        )
    return run(model, stream, folder, progress)


def load_stream(config: Config, facts: BackboneFacts, progress: Progress = SILENT) -> Stream:
    """Load the images and deal them into tasks, as the method takes them."""
    dataset = datasets.load(config.dataset, facts.stored, options=config.data, progress=progress)
    how = config.stream
    if how.groups is not None:
        stream = from_groups(dataset, how.groups)
    else:
        seed = config.seed if how.order_seed is None else how.order_seed
        stream = split(dataset, how.first, how.increment, None if seed < 0 else seed)
    if config.held_out:
        stream = stream.held_out(config.held_out, config.data.split_seed)
    if config.data.limit is not None:
        stream = stream.limited(config.data.limit, config.data.split_seed)
    without = [f"task {task.index + 1} has no test images" for task in stream if not len(task.test)]
    if without:
        raise problems(f"dataset {config.dataset}", without)
    return build(config.method, config.options).stream(stream)


def make_view(facts: BackboneFacts, stream: Stream, config: Config) -> View:
    """Prepare images as the backbone expects, and vary training images as the dataset allows."""
    return View(
        size=facts.size,
        stored=facts.stored,
        mean=facts.mean,
        std=facts.std,
        flip=stream.flip if config.data.flip is None else config.data.flip,
        crop=stream.crop if config.data.crop is None else config.data.crop,
        interpolation=facts.interpolation if facts.interpolation in INTERPOLATIONS else "bicubic",
    )


def _refuse_change(before: Config, now: Config, folder: Path) -> None:
    changed = difference(before.model_dump(mode="json"), now.model_dump(mode="json"))
    changed = [line for line in changed if not line.startswith(tuple(f"{key}:" for key in FREE))]
    if changed:
        raise problems(
            f"{folder} holds a run of another configuration, which is kept as it is; it",
            [*changed, "give another folder with --out, or the configuration of before"],
        )
