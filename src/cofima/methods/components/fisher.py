"""Fisher information of the weights on a task: its options, its estimates, and sums over tasks."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from cofima.core import distributed
from cofima.core.progress import STEP
from cofima.data.stream import Task
from cofima.methods.components.cost import FISHER_PASS
from cofima.methods.state import Entry
from cofima.models.net import Net
from cofima.training.context import Context
from cofima.training.loop import batches, ordered_batches, plain_batches
from cofima.weights.fisher.diagonal import diagonal_fisher
from cofima.weights.ops import Weights

RELEASED_CLIP = 1e-4
FISHER = Entry("fisher.", axis="weight", merge="sum")


class FisherOptions(BaseModel):
    """Options of the Fisher information. The defaults are the paper's definition."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    labels: Literal["data", "sampled", "exact"] = "data"
    """Labels of the data (empirical Fisher), one drawn from the model, or the exact expectation."""
    logits: Literal["seen", "local"] = "seen"
    """Softmax over all classes seen, or over the task's own."""
    norm: Literal["none", "mean"] = "none"
    """Divide by the mean over all weights, so that a task with a larger loss does not weigh more."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Cut larger values off."""


class AverageFisherOptions(FisherOptions):
    """Options of the Fisher information where it weighs an average of two models."""

    share: Literal["free", "equal"] = "free"
    """Length of the step: as the two Fishers have it, or lam times the way, by a factor of the new Fisher."""


class KeptFisherOptions(AverageFisherOptions):
    """Options of the Fisher information that a model keeps for the next average."""

    kept: Literal["float32", "bfloat16"] = "float32"
    """Precision in which it is kept for the next task; bfloat16 takes half the room."""


class PassingFeatures:
    """Features of images, kept on their way to the head while something else is measured of each batch.

    They are those that a pass of their own would compute, bit for bit: of the same weights and batches.
    """

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self._now: Tensor | None = None

    def watch(self, net: Net, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches; of one that the network sees in parts only, no features are kept."""
        hook = net.backbone.register_forward_hook(self._keep)
        try:
            for images, labels in batches:
                self._now, self._size = None, len(images)
                yield images, labels
                self.rows += [] if self._now is None else [self._now]
        finally:
            hook.remove()

    def all(self, count: int) -> Tensor | None:
        """Return the features of ``count`` images, or None if those of some are missing."""
        return torch.cat(self.rows) if sum(map(len, self.rows)) == count > 0 else None

    def _keep(self, module: nn.Module, given: Any, features: Tensor) -> None:
        if self._now is None and len(features) == self._size:
            self._now = features.detach().float().cpu()


def task_fisher(
    net: Net, task: Task, context: Context, how: FisherOptions, passing: PassingFeatures | None = None
) -> Weights:
    """Return the Fisher information of ``net`` on a task's training images, without augmentation."""
    local = how.logits == "local" and len(task.classes) > 1  # one logit alone has no information
    part, generator = (
        distributed.current_shard(len(task.train)),
        context.seeds.generator("fisher", task.index),
    )
    pairs = plain_batches(task.train, context, "fisher", part, STEP * FISHER_PASS)
    fisher = diagonal_fisher(
        net,
        pairs if passing is None else passing.watch(net, pairs),
        how.labels,
        columns=slice(task.classes.start, task.classes.stop) if local else None,
        generator=generator,
        drawn=_drawn(part, context.train.batch_size, generator) if distributed.world_size() > 1 else None,
    )
    return scaled({key: part.mean(value) for key, value in fisher.items()}, how)


def scaled(fisher: Weights, how: FisherOptions) -> Weights:
    """Return measured Fisher information over its mean, and cut off, where the options say so."""
    if how.norm == "mean":
        total = sum(float(f.double().sum()) for f in fisher.values())
        count = sum(f.numel() for f in fisher.values())
        fisher = {key: f * (count / total) if total > 0 else f for key, f in fisher.items()}
    return fisher if how.clip is None else {key: f.clamp(max=how.clip) for key, f in fisher.items()}


def released_fisher(net: Net, task: Task, context: Context) -> Weights:
    """Return the authors' released estimate: squared batch gradients of augmented images, clipped."""
    order = batches(
        len(task.train), context.train.batch_size, context.seeds.generator("fisher loader", task.index)
    )
    part = distributed.current_shard(len(order))  # of the batches: the mean gradient of each is squared
    fisher = diagonal_fisher(net, _augmented(task, context, order, part), estimator="batch", training=True)
    return {key: part.mean(f).clamp(max=RELEASED_CLIP) for key, f in fisher.items()}


def weighted(fisher: Weights, task: Task, by: Literal["classes", "samples", "tasks"]) -> Weights:
    """Return Fisher information times the task's weight in a sum over tasks."""
    counts = {"classes": task.taught, "samples": len(task.train), "tasks": 1}[by]
    return {key: value * counts for key, value in fisher.items()}


def add_fisher(total: Weights, fisher: Weights) -> Weights:
    """Return the sum over tasks with a task added; new weights enter with their own values."""
    return {key: _sum(total[key], value) if key in total else value for key, value in fisher.items()}


def _sum(total: Tensor, value: Tensor) -> Tensor:
    """Return the sum; where a tensor has grown, its new rows enter with their own values."""
    if total.shape == value.shape:
        return total + value
    grown = value.clone()
    grown[: len(total)] += total
    return grown


def _drawn(part: distributed.Shard, batch: int, generator: torch.Generator) -> Iterator[float]:
    """Return the random numbers that decide this shard's labels: those that one process would draw."""
    sizes = [len(at) for at in ordered_batches(part.whole, batch)]
    numbers = [torch.rand(size, generator=generator, dtype=torch.float64) for size in sizes]
    return iter(torch.cat(numbers)[part.rows].tolist())


def _augmented(
    task: Task, context: Context, order: list[Tensor], part: distributed.Shard
) -> Iterator[tuple[Tensor, Tensor]]:
    augment = context.seeds.generator("fisher augment", task.index)
    for index in order[: part.start]:  # draw what others use, and vary no image by it
        context.view.train(task.train.batch(index[:0])[0], augment, distributed.Shard(0, 0, len(index)))
    for index in context.progress.track(order[part.rows], part.stop - part.start, "fisher"):
        pixels, labels = task.train.batch(index)
        with torch.no_grad():
            images = context.view.train(pixels.to(context.device), augment)
        yield images, labels.to(context.device)
        context.progress.worked(STEP * FISHER_PASS * len(index))
