"""Loss and accuracy of networks at any point in weight space between those of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.analysis.relearn import Relearned
from cofima.core.errors import CofimaError
from cofima.data.image_set import ImageSet
from cofima.data.stream import Stream, Task
from cofima.methods.components.batchnorm import refresh_batchnorm, statistics_moved
from cofima.models.backbone import build_like
from cofima.models.net import Net
from cofima.training.context import Context
from cofima.training.loop import plain_batches
from cofima.weights.ops import Weights, snapshot

PARTS = ("old", "new", "all")
NAMES = {"old": "earlier tasks", "new": "the new task", "all": "all tasks"}
Measured = Literal["accuracy", "loss"]
AXES: dict[Measured, str] = {"accuracy": "Accuracy (%)", "loss": "Loss"}
_TASKS = {"old": slice(-1), "new": slice(-1, None), "all": slice(None)}


@dataclass(frozen=True)
class Measurement:
    """Accuracy (%) and cross-entropy over all classes seen, per task, with the number of images."""

    accuracy: list[float]
    loss: list[float]
    sizes: list[int]

    def mean(self, measured: Measured, part: str) -> float:
        """Return the mean over the images of earlier tasks (old), of the last task (new), or of all."""
        values, sizes = getattr(self, measured)[_TASKS[part]], self.sizes[_TASKS[part]]
        return float(sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes))

    def columns(self) -> dict[str, object]:
        """Return accuracy and loss on each part, as columns of a CSV file."""
        return {f"{measured}_{part}": self.mean(measured, part) for measured in AXES for part in PARTS}


@torch.inference_mode()
def measure(predict: Callable[[Tensor], Tensor], seen: Sequence[Task], context: Context) -> Measurement:
    """Measure ``predict`` on the test images of the tasks seen, among all their classes."""
    found = Measurement([], [], [])
    for task in seen:
        label = f"test {task.index + 1}/{len(seen)}"
        pairs = [(predict(x).float(), y) for x, y in plain_batches(task.test, context, label)]
        logits, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
        found.accuracy.append(100.0 * float((logits.argmax(1) == labels).double().mean()))
        found.loss.append(float(cross_entropy(logits.double(), labels)))
        found.sizes.append(len(labels))
    return found


def fewer(stream: Stream, images: int | None) -> Stream:
    """Return the stream with at most ``images`` evenly spaced test images per task."""
    if images is None:
        return stream
    tasks = tuple(replace(task, test=spread(task.test, images)) for task in stream)
    return replace(stream, tasks=tasks)


def spread(images: ImageSet, most: int) -> ImageSet:
    """Return at most ``most`` images, evenly spaced over the set."""
    if most >= len(images):
        return images
    return images.select(torch.arange(most) * len(images) // most)


HeadKind = Literal["raw", "aligned"]


class Evaluator:
    """Evaluation of networks with the trained head (raw), or with a head aligned to each of them.

    The raw head is the same everywhere, so that only the backbone makes a difference. An aligned head is what
    the method would compute for each network: Gaussians of the new classes, then an alignment.
    """

    def __init__(self, task: Relearned, head: HeadKind = "raw", images: int | None = None) -> None:
        self.task, self.aligned = task, head == "aligned"
        method = task.before.method
        if self.aligned and not method.aligns_head:
            raise CofimaError(f"--head aligned: {method.label} does not align its head; use --head raw")
        self.context, facts = method.context, task.run.facts
        self.seen = fewer(task.seen, images)
        empty = build_like(facts)
        sizes = [len(each.classes) for each in task.seen]
        self.net = Net(empty, facts.features, sizes).to(self.context.device).eval()
        self.stale = statistics_moved(task.old, task.trained)

    def measure(self, weights: Weights, *, statistics: bool = False) -> Measurement:
        """Measure these weights; batch-norm statistics are re-estimated unless ``statistics`` is True."""
        self.net.load_state_dict(weights)
        if self.stale and not statistics:
            refresh_batchnorm(self.net, plain_batches(self.task.task.train, self.context, "batch norm"))
        if not self.aligned:
            return measure(self.net, self.seen, self.context)
        model = self.task.align_at(snapshot(self.net))
        model.method.net.eval()
        return measure(model.method.predict, self.seen, self.context)
