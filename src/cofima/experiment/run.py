"""The task loop: learn, score, write, again."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cofima import generations, ranks, store
from cofima.data.stream import Stream, Task
from cofima.experiment.inflight import keeping
from cofima.experiment.journal import Journal, Listener
from cofima.models import backbone
from cofima.progress import Progress
from cofima.store import Model
from cofima.training.evaluate import Score
from cofima.training.inflight import NOT_KEPT
from cofima.weights.distance import weight_distance


def run(
    model: Model, stream: Stream, folder: Path, progress: Progress, listeners: Sequence[Listener] = ()
) -> Model:
    """Learn the tasks that the model has not learned yet; each is on disk before the next begins."""
    method = model.method
    journal = Journal(folder, model.history, listeners if ranks.rank() == 0 else ())
    method.context = replace(method.context, watch=journal.epoch, inflight=keeping(model, folder))
    for task in stream[len(model.tasks) :]:
        with progress.stage(f"{method.label}: task {task.index + 1}/{len(stream)}"):
            journal.begin()
            method.learn(task)
            with method.timed("evaluate"):
                score = method.score(stream[: task.index + 1])
        model.tasks.append(task.names)
        if ranks.rank() > 0:
            continue  # the first process writes
        model.history.append(_row(model, task, score, folder))
        store.save(model, folder, progress)
        journal.task(model.history[-1])
        progress.say(_summary(model, len(stream)))
    method.context = replace(method.context, inflight=NOT_KEPT)  # what comes later is not of this run
    return model


def _row(model: Model, task: Task, score: Score, folder: Path) -> dict[str, Any]:
    """Return what the history says of a task."""
    facts = model.method.facts
    moved = _from_before(model, folder)
    return {
        "task": task.index + 1,
        "classes": list(task.names),
        "accuracy": score.accuracy,
        "sizes": score.sizes,
        "top5": score.top5,
        "task_aware": score.task_aware,
        "lam": facts["lam"],
        "distance": {
            "trained": facts.get("trained_distance", moved),
            "merged": moved,
            "from_start": _from_start(model),
        },
        "seconds": _seconds(facts["seconds"]),
        "peak_memory_mb": _peak_memory(),
        "state_bytes": sum(v.numel() * v.element_size() for v in model.method.state().values()),
        "train_images": len(task.train),
        "notes": facts["notes"],
    } | ({"processes": ranks.world()} if ranks.world() > 1 else {})


def _summary(model: Model, tasks: int) -> str:
    """Say in one line what the last task came to."""
    row = model.history[-1]
    right = sum(a * n for a, n in zip(row["accuracy"], row["sizes"], strict=True)) / sum(row["sizes"])
    learned, seconds = f"task {row['task']}/{tasks} learned", row["seconds"]["total"]
    return f"{model.method.label}: {learned}, {right:.1f} % on {len(model.classes)} classes, {seconds:.0f} s"


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in module.named_parameters()}


def _from_before(model: Model, folder: Path) -> float | None:
    """Return how far the backbone is from where the task before left it, which is on disk."""
    if generations.current(folder) is None:
        return None
    return weight_distance(generations.read(folder).weights(), _parameters(model.method.net.backbone))


def _from_start(model: Model) -> float | None:
    """Return how far the backbone is from its pre-trained weights, which are read again, not kept."""
    how = model.config.model.model_copy(update={"size": model.backbone.size})
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
