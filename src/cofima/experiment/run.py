"""The learning path: learn a task, evaluate it, and create its history row.

:func:`run` learns the tasks of a stream into a folder. Classifiers call :func:`learn_task` for each task, and
evaluate and save by themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cofima.core import distributed
from cofima.core.extras import installed_version
from cofima.core.progress import Progress
from cofima.core.system import peak_memory
from cofima.data.stream import Stream, Task
from cofima.experiment.metrics_log import Listener, MetricsLog
from cofima.methods import Method
from cofima.methods.components.cost import Plan
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
from cofima.weights.ops import Weights

KEPT = 2**23  # weights, 32 MB: kept in memory up to this size


def run(
    model: Model, stream: Stream, folder: Path, progress: Progress, listeners: Sequence[Listener] = ()
) -> Model:
    """Learn the remaining tasks of a stream, and save the model after each.

    Tasks that the model has already learned are skipped, so the same call resumes an interrupted run.
    """
    method = model.method
    log = MetricsLog(folder, model.history, listeners if distributed.rank() == 0 else ())
    checkpoint, start = _checkpoint(model, folder), _Start(model)
    progress.expect(expected_work(model, stream[len(model.tasks) :]))
    for task in stream[len(model.tasks) :]:
        seen = stream[: task.index + 1]
        with progress.stage(f"{method.label}: task {task.index + 1}/{len(stream)}"):
            log.begin()
            # A checkpoint is only valid for the generation that its task started from.
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
            continue  # rank 0 measures and saves
        row.distance = _distance(model, folder, start)
        model.history.append(row)
        save_model(model, folder, progress)
        log.task(row)  # after the model: after a kill in between, the line is restored from the history
        progress.say(_summary(model, row, len(stream)))
    return model


def expected_work(model: Model, tasks: Sequence[Task], train: TrainOptions | None = None) -> float:
    """Return the cost of learning tasks, in forward passes of one image."""
    how = model.method.context.train if train is None else train
    train_images, test_images = sum(len(task.train) for task in tasks), sum(len(task.test) for task in tasks)
    plan = Plan(how.epochs, train_images, test_images, len(tasks), how.head_init == "lda")
    return model.method.cost(plan).work if tasks else 0.0


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
    still: bool = False,
) -> HistoryRow:
    """Learn one task and return its history row, which the caller completes and appends.

    Args:
        model: Trained in place; the classes of the task are added to it.
        task: New classes, or more images of known ones.
        kind: The kind of the row.
        train: Training options of this task; by default those of the configuration.
        patience: Stop after this many epochs without a smaller loss on the task's test images. These must be
            held out for this purpose, and results must not be reported on them.
        checkpoint: Saves checkpoints within the task.
        on_epoch: Called with the task, number, losses and learning rates of each epoch.
        evaluate: Scores the model after the task.
        still: Keep the backbone frozen: see :meth:`cofima.methods.Method.learn`.
    """
    method = model.method
    train = method.context.train if train is None else train
    stop = EarlyStop(method, task, patience) if patience and len(task.test) else None
    epochs = _Epochs(on_epoch)
    model.planned = max(model.planned, task.index + 1)
    # A classifier has no fixed number of tasks: planned grows with each extension.
    context = replace(method.context, train=train, tasks=model.planned)
    method.learn(task, context=context, hooks=Hooks(checkpoint, epochs, stop), still=still)
    score = None
    if evaluate is not None:
        with method.timed("evaluate"):
            score = evaluate()
    if not task.known:
        model.tasks.append(task.names)
    # If an earlier process completed the training and was then killed, this callback has seen no epoch.
    return _row(model, task, kind, score, max(epochs.count, checkpoint.epochs_before))


def _checkpoint(model: Model, folder: Path) -> Checkpoint:
    """Return the mid-task checkpoint; with several processes, runs resume after finished tasks only."""
    every = interval()
    if every is None or distributed.world_size() > 1:
        return NO_CHECKPOINT
    facts = {
        "config": model.config.model_dump(mode="json"),
        "data": model.data,
        "environment": {
            "cofima": installed_version("cofima"),
            "torch": installed_version("torch"),
            "device": model.method.context.device.type,
            "threads": torch.get_num_threads(),
        },
    }
    return RunCheckpoint(folder / model_folder.INFLIGHT, model.method, facts, every)


class EarlyStop:
    """Early stopping on the loss of held-out images."""

    def __init__(self, method: Method, task: Task, patience: int) -> None:
        self.method, self.task, self.patience = method, task, patience
        self.best, self.waited = torch.inf, 0

    def __call__(self) -> bool:
        """Measure the loss after an epoch; return True after ``patience`` epochs without a smaller one."""
        # Modes are restored one by one: net.train() would also unfreeze batch normalization in eval mode.
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
        """Return the mean loss over the task's own classes, or over all classes if it has only one."""
        classes = self.task.classes
        span = slice(classes.start, classes.stop) if len(classes) > 1 else slice(0, classes.stop)
        total = 0.0
        for images, labels in plain_batches(self.task.test, self.method.context, "held-out images"):
            logits = self.method.predict(images)[:, span]
            total += float(cross_entropy(logits.float(), labels - span.start, reduction="sum"))
        return total / len(self.task.test)


class _Epochs:
    """Epoch callback that counts epochs and forwards them."""

    def __init__(self, forward: OnEpoch | None) -> None:
        self.forward, self.count = forward, 0

    def __call__(self, task: int, epoch: int, losses: Tensor, rates: list[float]) -> None:
        self.count = max(self.count, epoch + 1)
        if self.forward is not None:
            self.forward(task, epoch, losses, rates)


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
        **({} if score is None else asdict(score)),  # fields of the same names
    )


def _summary(model: Model, row: HistoryRow, tasks: int) -> str:
    """Return the result of a task in one line."""
    learned = f"task {row.task}/{tasks} learned, {row.overall:.1f} % on {len(model.classes)} classes"
    return f"{model.method.label}: {learned}, {row.seconds['total']:.0f} s"


def _distance(model: Model, folder: Path, start: "_Start") -> Distance:
    """Measure the distance of the backbone from the previous task, read from disk, and from the start."""
    moved = _from_before(model, folder)
    trained = model.method.facts.get("trained_distance", moved)
    return Distance(trained=trained, merged=moved, from_start=start.distance())


def _parameters(module: nn.Module) -> Weights:
    return {name: value.detach().cpu() for name, value in module.named_parameters()}


def _from_before(model: Model, folder: Path) -> float | None:
    if model_folder.current(folder) is None:
        return None
    return weight_distance(model_folder.read(folder).weights(), _parameters(model.method.net.backbone))


class _Start:
    """Initial weights of a run: small networks are kept in memory, large ones read again after each task."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.kept: Weights = {}
        own = _parameters(model.method.net.backbone)
        # Before the first task these are the initial weights: building them again can take as long as a task.
        if not model.tasks and sum(value.numel() for value in own.values()) <= KEPT:
            self.kept = {name: value.clone() for name, value in own.items()}

    def distance(self) -> float | None:
        """Return the distance of the backbone from its initial weights; None if they have changed on disk."""
        start, now = self.kept or self._read(), _parameters(self.model.method.net.backbone)
        if sum(value.numel() for value in start.values()) <= KEPT:
            self.kept = start
        return weight_distance(start, now) if start else None

    def _read(self) -> Weights:
        used = self.model.backbone
        how = self.model.config.model.model_copy(update={"img_size": used.size})
        start, facts = backbone.create(used.source, how, self.model.config.seed)
        return _parameters(start) if facts.sha256 == used.sha256 else {}


def _peak_memory() -> float:
    """Return the peak memory in MB, of the GPU if there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    return peak_memory() / 1e6


def _seconds(phases: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase; the total includes the evaluation."""
    phases = phases | {"total": phases["total"] + phases.get("evaluate", 0.0)}
    return {phase: round(value, 3) for phase, value in phases.items()}
