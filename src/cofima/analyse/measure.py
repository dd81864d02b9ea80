"""Loss and accuracy on the tasks seen, from one pass over their test images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.data.images import ImageSet
from cofima.data.stream import Stream, Task
from cofima.training.sgd import Context, plain_batches

PARTS = ("old", "new", "all")
_TASKS = {"old": slice(-1), "new": slice(-1, None), "all": slice(None)}


@dataclass(frozen=True)
class Measure:
    """Accuracy (%) and cross-entropy over all classes seen, on each task, and how many images each has."""

    accuracy: list[float]
    loss: list[float]
    sizes: list[int]

    def accuracy_on(self, part: str) -> float:
        """Return the accuracy over the images of earlier tasks (old), of the last (new), or of all."""
        return self._mean(self.accuracy, part)

    def loss_on(self, part: str) -> float:
        """Return the loss over the images of earlier tasks (old), of the last (new), or of all."""
        return self._mean(self.loss, part)

    def _mean(self, values: list[float], part: str) -> float:
        sizes = self.sizes[_TASKS[part]]
        return sum(v * n for v, n in zip(values[_TASKS[part]], sizes, strict=True)) / sum(sizes)


@torch.inference_mode()
def measure(predict: Callable[[Tensor], Tensor], seen: Sequence[Task], context: Context) -> Measure:
    """Measure ``predict`` on the test images of the tasks seen, over all their classes."""
    found = Measure([], [], [])
    for task in seen:
        label = f"test {task.index + 1}/{len(seen)}"
        pairs = [(predict(x).float(), y) for x, y in plain_batches(task.test, context, label)]
        logits, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
        found.accuracy.append(100.0 * float((logits.argmax(1) == labels).double().mean()))
        found.loss.append(float(cross_entropy(logits.double(), labels)))
        found.sizes.append(len(labels))
    return found


def fewer(stream: Stream, images: int | None) -> Stream:
    """Return the stream with at most so many test images a task, evenly spread over them."""
    if images is None:
        return stream
    tasks = tuple(replace(task, test=spread(task.test, images)) for task in stream)
    return replace(stream, tasks=tasks)


def spread(images: ImageSet, most: int) -> ImageSet:
    """Return at most so many images, evenly spread over the set in its order."""
    if most >= len(images):
        return images
    return images.select(torch.arange(most) * len(images) // most)
