"""The one learning path: a task is learned, measured, and gets its row of the history.

:func:`run` learns the tasks of a stream into a folder. A classifier learns task by task with
:func:`learn_task`, and measures and writes by itself.
"""

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cofima.core import distributed
from cofima.core.progress import Progress
from cofima.data.stream import Stream, Task
from cofima.experiment.metrics_log import Listener, MetricsLog
from cofima.methods import Method
from cofima.models import backbone
from cofima.store import model_folder
from cofima.store.history import Distance, HistoryRow, Kind, now
from cofima.store.model import Model, save_model
from cofima.training.checkpoint import NO_CHECKPOINT, Checkpoint, RunCheckpoint, interval
from cofima.training.context import Hooks, OnEpoch
from cofima.training.evaluate import Score
from cofima.training.loop import plain_batches
from cofima.training.options import TrainOptions
from cofima.weights.distance import weight_distance


def run(
    model: Model, stream: Stream, folder: Path, progress: Progress, listeners: Sequence[Listener] = ()
) -> Model:
    """Learn the tasks that the model has not learned yet; each is on disk before the next begins."""
    method = model.method
    log = MetricsLog(folder, model.history, listeners if distributed.rank() == 0 else ())
    checkpoint = _checkpoint(model, folder)
    for task in stream[len(model.tasks) :]:
        seen = stream[: task.index + 1]
        with progress.stage(f"{method.label}: task {task.index + 1}/{len(stream)}"):
            log.begin()
            checkpoint.start_task(task.index, model_folder.generation_id(folder))
            row = learn_task(
                model,
                task,
                "task",
                checkpoint=checkpoint,
                on_epoch=log.epoch,
                evaluate=partial(method.score, seen),
            )
        if distributed.rank() > 0:
            continue  # the first process writes
        row.distance = _distance(model, folder)
        model.history.append(row)
        save_model(model, folder, progress)
        log.task(row)
        progress.say(_summary(model, row, len(stream)))
    return model


def learn_task(
    model: Model,
    task: Task,
    kind: Kind,
    *,
    train: TrainOptions | None = None,
    patience: int | None = None,
    checkpoint: Checkpoint = NO_CHECKPOINT,
    on_epoch: OnEpoch | None = None,
    evaluate: Callable[[], Score] | None = None,
) -> HistoryRow:
    """Learn one task and return its row of the history, which the caller adds when all is measured.

    Args:
        model: Learns, and counts the task among its own.
        task: New classes, or more images of known ones.
        kind: The row's kind.
        train: Training options of this task; those of the configuration by default.
        patience: Stop when the task's test images got no better for so many epochs. They must be images
            held out for that, and not those that a result is reported on.
        checkpoint: Keeps how far the training is.
        on_epoch: Told each epoch's task, number, losses and learning rates.
        evaluate: Scores the model when the task is learned.
    """
    method = model.method
    train = method.context.train if train is None else train
    stop = EarlyStop(method, task, patience) if patience and len(task.test) else None
    epochs = _Epochs(on_epoch)
    model.planned = max(model.planned, task.index + 1)
    context = replace(method.context, train=train, tasks=model.planned)
    method.learn(task, context=context, hooks=Hooks(checkpoint, epochs, stop))
    score = None
    if evaluate is not None:
        with method.timed("evaluate"):
            score = evaluate()
    if not task.known:
        model.tasks.append(task.names)
    return _row(model, task, kind, score, max(epochs.count, checkpoint.epochs_before))


def _checkpoint(model: Model, folder: Path) -> Checkpoint:
    """Return what keeps tasks in progress; several processes go on after finished tasks only."""
    every = interval()
    if every is None or distributed.world_size() > 1:
        return NO_CHECKPOINT
    facts = {
        "config": model.config.model_dump(mode="json"),
        "data": model.data,
        "environment": {
            "cofima": version("cofima"),
            "torch": version("torch"),
            "device": model.method.context.device.type,
            "threads": torch.get_num_threads(),
        },
    }
    return RunCheckpoint(folder / model_folder.INFLIGHT, model.method, facts, every)


class EarlyStop:
    """Stop the training when the loss on held-out images got no smaller for some epochs."""

    def __init__(self, method: Method, task: Task, patience: int) -> None:
        self.method, self.task, self.patience = method, task, patience
        self.best, self.waited = torch.inf, 0

    def __call__(self) -> bool:
        """Score the weights after an epoch; true after ``patience`` epochs without a smaller loss."""
        modes = [(module, module.training) for module in self.method.net.modules()]
        self.method.net.eval()
        loss = self._loss()
        for module, training in modes:
            module.training = training
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= self.patience

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the mean loss over the task's own classes, or over all where it has only one."""
        classes = self.task.classes
        span = slice(classes.start, classes.stop) if len(classes) > 1 else slice(0, classes.stop)
        total = 0.0
        for images, labels in plain_batches(self.task.test, self.method.context, "held-out images"):
            logits = self.method.predict(images)[:, span]
            total += float(cross_entropy(logits.float(), labels - span.start, reduction="sum"))
        return total / len(self.task.test)


class _Epochs:
    """Count the epochs of a task, and pass each on."""

    def __init__(self, pass_on: OnEpoch | None) -> None:
        self.pass_on, self.count = pass_on, 0

    def __call__(self, task: int, epoch: int, losses: Tensor, rates: list[float]) -> None:
        self.count = max(self.count, epoch + 1)
        if self.pass_on is not None:
            self.pass_on(task, epoch, losses, rates)


def _row(model: Model, task: Task, kind: Kind, score: Score | None, epochs: int) -> HistoryRow:
    facts, state = model.method.facts, model.method.state()
    return HistoryRow(
        kind=kind,
        task=len(model.tasks),
        date=now(),
        classes=list(task.names),
        lam=facts["lam"],
        seconds=_seconds(facts["seconds"]),
        peak_memory_mb=_peak_memory(),
        state_bytes=sum(value.numel() * value.element_size() for value in state.values()),
        train_images=len(task.train),
        epochs=epochs or None,
        notes=facts["notes"],
        processes=distributed.world_size(),
        **({} if score is None else asdict(score)),  # named as in the history
    )


def _summary(model: Model, row: HistoryRow, tasks: int) -> str:
    """Say in one line what a task came to."""
    learned = f"task {row.task}/{tasks} learned, {row.overall:.1f} % on {len(model.classes)} classes"
    return f"{model.method.label}: {learned}, {row.seconds['total']:.0f} s"


def _distance(model: Model, folder: Path) -> Distance:
    """Measure how far the backbone is from the task before, which is on disk, and from its start."""
    moved = _from_before(model, folder)
    trained = model.method.facts.get("trained_distance", moved)
    return Distance(trained=trained, merged=moved, from_start=_from_start(model))


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in module.named_parameters()}


def _from_before(model: Model, folder: Path) -> float | None:
    if model_folder.current(folder) is None:
        return None
    return weight_distance(model_folder.read(folder).weights(), _parameters(model.method.net.backbone))


def _from_start(model: Model) -> float | None:
    """Return the distance from the pre-trained weights, which are read again, not kept."""
    how = model.config.model.model_copy(update={"img_size": model.backbone.size})
    start, facts = backbone.create(model.backbone.name, how, model.config.seed)
    if facts.sha256 != model.backbone.sha256:
        return None
    return weight_distance(_parameters(start), _parameters(model.method.net.backbone))


def _peak_memory() -> float:
    """Return the most memory used so far in MB: the GPU's where there is one, else the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _seconds(phases: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase; the total includes the evaluation."""
    phases = phases | {"total": phases["total"] + phases.get("evaluate", 0.0)}
    return {phase: round(value, 3) for phase, value in phases.items()}
