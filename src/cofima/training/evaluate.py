"""What a classifier knows: its logits on every test image, computed once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cofima.data.stream import Task
from cofima.training.sgd import Context, plain_batches


@dataclass(frozen=True)
class Score:
    """Accuracies in percent on each task seen, and how many test images each has."""

    accuracy: list[float]
    top5: list[float]
    task_aware: list[float]
    """Accuracy if the task of each image were known."""
    sizes: list[int]


@torch.inference_mode()
def evaluate(predict: Callable[[Tensor], Tensor], seen: Sequence[Task], context: Context) -> Score:
    """Score ``predict`` on the test images of the tasks seen, over all their classes."""
    score = Score([], [], [], [])
    for task in seen:
        label = f"test {task.index + 1}/{len(seen)}"
        pairs = [(predict(x).float(), y) for x, y in plain_batches(task.test, context, label)]
        logits, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
        own = logits[:, task.classes.start : task.classes.stop].argmax(1) + task.classes.start
        score.accuracy.append(_percent(logits.argmax(1) == labels))
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        score.top5.append(_percent((top == labels[:, None]).any(1)))
        score.task_aware.append(_percent(own == labels))
        score.sizes.append(len(labels))
    return score


def _percent(right: Tensor) -> float:
    return 100.0 * float(right.double().mean())
