"""Evaluation on the test images of all tasks seen so far; logits are computed once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cofima.core import distributed
from cofima.data.image_set import ImageSet
from cofima.data.stream import Task
from cofima.training.context import Context
from cofima.training.loop import plain_batches


@dataclass(frozen=True)
class Score:
    """Accuracies in percent, one per task seen, and the number of test images of each."""

    accuracy: list[float]
    top5: list[float]
    task_aware: list[float]
    """Accuracy if the task of each image were known (task-incremental setting)."""
    sizes: list[int]


Batches = Callable[[ImageSet, str], Iterable[tuple[Tensor, ...]]]


@torch.inference_mode()
def evaluate(
    predict: Callable[..., Tensor], seen: Sequence[Task], context: Context, batches: Batches | None = None
) -> Score:
    """Evaluate ``predict`` on the test images of the tasks seen so far, over all their classes.

    Args:
        predict: Function from images, or from the inputs that ``batches`` yields, to logits.
        seen: The tasks seen so far.
        context: Context of the method.
        batches: Function that yields inputs of ``predict`` and labels for this process's shard of a task's
            images; by default the images themselves, without augmentation.
    """
    score = Score([], [], [], [])
    take = batches or (
        lambda images, label: plain_batches(images, context, label, distributed.current_shard(len(images)))
    )
    for task in seen:
        label = f"test {task.index + 1}/{len(seen)}"
        pairs = [(predict(*inputs).float(), y) for *inputs, y in take(task.test, label)]
        part = distributed.current_shard(len(task.test))
        logits, labels = (part.gather(torch.cat(rows)) for rows in zip(*pairs, strict=True))
        own = logits[:, task.classes.start : task.classes.stop].argmax(1) + task.classes.start
        score.accuracy.append(_percent(logits.argmax(1) == labels))
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        score.top5.append(_percent((top == labels[:, None]).any(1)))
        score.task_aware.append(_percent(own == labels))
        score.sizes.append(len(labels))
    return score


def _percent(right: Tensor) -> float:
    return 100.0 * float(right.double().mean())
