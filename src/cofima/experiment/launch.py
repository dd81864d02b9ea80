"""Start a run from a configuration, or resume it with the same call."""

import signal
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from cofima import methods
from cofima.core import distributed, torchrun
from cofima.core.errors import CofimaError, problems
from cofima.core.lock import folder_lock
from cofima.core.progress import SILENT, Progress
from cofima.core.settings import uncounted
from cofima.core.signals import Interrupted, handle_signals
from cofima.data import datasets
from cofima.experiment import metrics_log
from cofima.experiment.config import difference
from cofima.experiment.metrics_log import Listener
from cofima.experiment.run import run
from cofima.experiment.stream import load_stream, refuse_other_images, stream_view
from cofima.methods import build
from cofima.models import backbone, registry
from cofima.models.net import Net
from cofima.store import model_folder
from cofima.store.config import Config
from cofima.store.history import is_run
from cofima.store.model import Model, attach, load_model
from cofima.training import checkpoint, device
from cofima.training.loop import batchnorm_layers

FREE = uncounted(Config, "resumed")  # settings that may change when a run is resumed


def launch(
    config: Config,
    folder: Path,
    progress: Progress = SILENT,
    listeners: Sequence[Listener] = (),
    tasks: int | None = None,
) -> Model:
    """Learn the stream of ``config`` into ``folder``, or resume the run in it.

    A finished run is returned unchanged. A folder that holds a run with another configuration or other
    images, or that another process is writing, raises and is not changed. Processes started by ``torchrun``
    share the work.

    Args:
        config: The configuration.
        folder: The model folder.
        progress: Receives progress reports.
        listeners: Called with each line of metrics.jsonl.
        tasks: Stop after this many tasks; by default after all.
    """
    refuse_several(config, None)
    with distributed.process_group(device.choose(config.device)):
        if model_folder.finished(folder):
            return _continue(config, folder, progress, listeners, tasks)
        model_folder.check_writable(folder)
        with nullcontext() if distributed.rank() else folder_lock(folder), handle_signals():
            try:
                return _continue(config, folder, progress, listeners, tasks)
            except KeyboardInterrupt as error:
                raise _interrupted(error, folder) from None


def _continue(
    config: Config, folder: Path, progress: Progress, listeners: Sequence[Listener], tasks: int | None
) -> Model:
    started, midway = model_folder.current(folder) is not None, pending(folder)
    model = load_model(folder, where=config.device, progress=progress) if started else None
    learned = len(model.tasks) if model else 0
    distributed.require_same(f"{folder}", config.model_dump(mode="json"), learned)
    if model is not None:
        _refuse_change(model.config.model_dump(mode="json"), config, folder)
        if not is_run(model.history):
            raise CofimaError(f"{folder} is in use (cofima history {folder}): a run cannot continue it")
        if len(model.tasks) >= min(model.planned, tasks or model.planned):
            if distributed.rank() == 0:
                with suppress(CofimaError):  # a damaged log does not make the run incomplete
                    metrics_log.mend(folder, model.history)
            progress.say(f"done: {folder} has learned {len(model.tasks)} of {model.planned} tasks")
            return model
        at = f", at {checkpoint.describe(midway)}" if midway else ""
        progress.say(f"continuing {folder} after task {len(model.tasks)} of {model.planned}{at}")
    elif midway:
        _refuse_change(
            midway["config"], config, folder, f"remove {folder / model_folder.INFLIGHT} to begin anew"
        )
        progress.say(f"continuing {folder} at {checkpoint.describe(midway)}")
    return _learn(config, model, folder, midway, progress, listeners, tasks)


def pending(folder: Path) -> dict[str, Any]:
    """Return the description of a run's mid-task checkpoint; {} if there is none that can be resumed."""
    if checkpoint.interval() is None or distributed.world_size() > 1:
        return {}
    return checkpoint.pending(folder / model_folder.INFLIGHT, model_folder.generation_id(folder))


def _interrupted(error: KeyboardInterrupt, folder: Path) -> Interrupted:
    """Return the interruption with a message that says where the same command resumes."""
    midway, begun = pending(folder), model_folder.current(folder) is not None
    if midway:
        kept = f"the same command continues at {checkpoint.describe(midway)}"
    elif begun:
        tasks = len(model_folder.read(folder).record.tasks)
        kept = f"finished tasks are kept, the same command continues after task {tasks}"
    else:
        kept = "no task was finished, the same command continues from the beginning"
    return Interrupted(getattr(error, "signal", signal.SIGINT), kept)


def _learn(
    config: Config,
    model: Model | None,
    folder: Path,
    midway: dict[str, Any],
    progress: Progress,
    listeners: Sequence[Listener],
    tasks: int | None,
) -> Model:
    # Fail early: check the dataset before a backbone is downloaded, the method before images are read.
    absent = datasets.missing(config.dataset, config.data)
    if absent:
        raise CofimaError(absent)
    module, facts = (
        (None, model.backbone) if model else backbone.create(config.backbone, config.model, config.seed)
    )
    if module is not None:
        facts = replace(facts, overlap=registry.known_overlap(facts.pretraining, config.dataset))
        if config.model.checkpoint is not None:
            progress.say(f"backbone {config.backbone}: {config.model.checkpoint} read as {facts.layout}")
        method = build(config.method, config.options)
        method.check(module)
        method.check_train(config.train, module)
    refuse_several(config, module if model is None else model.method.net.backbone)
    stream = load_stream(config, facts, progress)
    distributed.require_same(f"dataset {config.dataset}", stream.facts.get("fingerprint"), len(stream))
    before = model.data if model else midway.get("data", {})
    refuse_other_images(before, stream.facts, config.dataset, folder)
    if model is None:
        assert module is not None
        view = stream_view(config, facts, stream)
        model = attach(config, facts, view, Net(module, facts.features), len(stream), progress)
        model.data = {"name": config.dataset} | stream.facts
    return run(model, stream[:tasks], folder, progress, listeners)


def _refuse_change(before: dict[str, Any], now: Config, folder: Path, *advice: str) -> None:
    changed = difference(before, now.model_dump(mode="json"))
    changed = [line for line in changed if not line.startswith(tuple(f"{key}:" for key in FREE))]
    if changed:
        raise problems(
            f"{folder} holds a run of another configuration, which is kept as it is; it",
            [*changed, "give another folder with --out, or the former configuration", *advice],
        )


def refuse_several(config: Config, module: nn.Module | None) -> None:
    """Raise if several processes would not compute the same result as one."""
    count = max(torchrun.world_size(), distributed.world_size())
    if count == 1:
        return
    kind, how, wrong = methods.find(config.method), config.train, []
    if kind.single_process_only:
        wrong.append(f"method = {config.method}: {kind.single_process_only}")
    if how.batch_size < count:
        wrong.append(f"train.batch_size = {how.batch_size}: smaller than the number of processes")
    if config.device not in ("auto", "cpu", "cuda"):
        wrong.append(f"device = {config.device}: one for all; give auto or cuda (a GPU each), or cpu")
    trained = not (kind.frozen_backbone or kind.fixed_features or kind.lora_options(how).rank)
    if module is not None and trained and how.batchnorm == "train" and batchnorm_layers(module):
        wrong.append(
            f"train.batchnorm = train: each process would normalize {config.backbone} by the statistics of "
            "its part of a batch; give train.batchnorm=frozen, or run in one process"
        )
    if wrong:
        raise problems(f"a run in {count} processes", wrong)
