"""One lesson: new classes, or more images of known ones, learned with an eye on held-out images."""

import datetime
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from cofima import config as configs
from cofima.data.images import ImageSet
from cofima.data.stream import Task
from cofima.errors import CofimaError
from cofima.methods import Method
from cofima.progress import Progress
from cofima.recipes.layers import override
from cofima.store import Model
from cofima.training.sgd import Train, plain_batches


class EarlyStop:
    """Say when held-out images got no better for some epochs."""

    def __init__(self, method: Method, task: Task, patience: int) -> None:
        self.method, self.task, self.patience = method, task, patience
        self.best, self.waited, self.epochs = torch.inf, 0, 0

    def __call__(self) -> bool:
        """Score the weights after an epoch; true after ``patience`` epochs without a smaller loss."""
        modes = [(module, module.training) for module in self.method.net.modules()]
        self.method.net.eval()
        loss = self._loss()
        for module, training in modes:
            module.training = training
        self.epochs += 1
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


def new_classes(model: Model, names: Sequence[str], train: ImageSet, held_out: ImageSet) -> Task:
    """Return the task that teaches new classes."""
    start = len(model.classes)
    return Task(len(model.tasks), range(start, start + len(names)), tuple(names), train, held_out)


def more_images(model: Model, names: Sequence[str], train: ImageSet, held_out: ImageSet) -> Task:
    """Return the task that teaches more images of known classes."""
    count = len(model.classes)
    known = tuple(sorted(model.classes.index(name) for name in names))
    return Task(len(model.tasks), range(count, count), tuple(names), train, held_out, known)


def teach(model: Model, task: Task, how: Train, progress: Progress) -> dict[str, Any]:
    """Learn a task; return what the history says of it, but for what is measured afterwards."""
    method, start = model.method, time.perf_counter()
    watch = EarlyStop(method, task, how.patience) if how.patience and len(task.test) else None
    model.planned = max(model.planned, task.index + 1)
    context = replace(method.context, train=how, tasks=model.planned, progress=progress)
    method.context = replace(context, stop=watch)
    with progress.stage(f"{method.label}: {', '.join(task.names[:3])}{', ...' if task.taught > 3 else ''}"):
        method.learn(task)
    method.context = context
    if not task.known:
        model.tasks.append(task.names)
    epochs = watch.epochs if watch is not None and watch.epochs else how.epochs
    return {
        "task": len(model.tasks),
        "kind": "more images" if task.known else "learn" if task.index == 0 else "extend",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "classes": list(task.names),
        "train_images": len(task.train),
        "held_out": len(task.test),
        "epochs": epochs,
        "lam": method.facts["lam"],
        "seconds": round(time.perf_counter() - start, 1),
        "notes": method.facts["notes"],
    }


def train_options(before: Train, epochs: int | None, given: Sequence[str]) -> Train:
    """Return the training options of before, with what is given this time."""
    wrong = [item for item in given if not item.startswith("train.")]
    if wrong:
        raise CofimaError(f"an extension takes train.key=value items only, not {', '.join(wrong)}")
    values = override({"train": before.model_dump()}, given)["train"]
    if epochs is not None:
        values |= {"epochs": epochs, "milestones": None}
    return configs.check({"train": values}, "the settings of this extension").train
