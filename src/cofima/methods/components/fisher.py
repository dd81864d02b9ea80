"""Fisher information of the weights on a task: options, estimates, and sums over tasks."""

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
    """Labels of the data (empirical Fisher), one label drawn from the model, or the exact expectation."""
    logits: Literal["seen", "local"] = "seen"
    """Softmax over all classes seen, or over the task's classes only."""
    norm: Literal["none", "mean"] = "none"
    """Divide by the mean over all weights, so that a task with a larger loss does not count more."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Upper bound to which values are clipped."""


class AverageFisherOptions(FisherOptions):
    """Options of the Fisher information that weights an average of two models."""

    share: Literal["free", "equal"] = "free"
    """Length of the step: as the Fishers give it, or, by scaling the new Fisher, lam times the distance."""


class KeptFisherOptions(AverageFisherOptions):
    """Options of the Fisher information that a model stores for the next average."""

    kept: Literal["float32", "bfloat16"] = "float32"
    """Precision in which it is stored for the next task; bfloat16 takes half the space."""


class PassingFeatures:
    """Features recorded by a hook while the Fisher information of each batch is computed.

    This saves a separate pass over the images, and is bit-identical to it: same weights, same batches.
    """

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self._now: Tensor | None = None

    def watch(self, net: Net, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches and record their features.

        A batch that the network saw in parts only, such as a few images one by one, passes once more.
        """
        hook = net.backbone.register_forward_hook(self._keep)
        try:
            for images, labels in batches:
                self._now, self._size = None, len(images)
                yield images, labels
                if self._now is None:
                    net.features(images)
                self.rows += [] if self._now is None else [self._now]
        finally:
            hook.remove()

    def all(self, count: int) -> Tensor | None:
        """Return the features of ``count`` images, or None if some are missing."""
        return torch.cat(self.rows) if sum(map(len, self.rows)) == count > 0 else None

    def _keep(self, module: nn.Module, given: Any, features: Tensor) -> None:
        if self._now is None and len(features) == self._size:
            self._now = features.detach().float().cpu()


def task_fisher(
    net: Net, task: Task, context: Context, how: FisherOptions, passing: PassingFeatures | None = None
) -> Weights:
    """Return the Fisher information of ``net`` on a task's training images, without augmentation."""
    local = how.logits == "local" and len(task.classes) > 1  # the softmax of a single logit is constant
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
    """Normalize and clip Fisher information as the options say."""
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
    part = distributed.current_shard(len(order))  # whole batches: the mean gradient of each is squared
    fisher = diagonal_fisher(net, _augmented(task, context, order, part), estimator="batch", training=True)
    return {key: part.mean(f).clamp(max=RELEASED_CLIP) for key, f in fisher.items()}


def weighted(fisher: Weights, task: Task, by: Literal["classes", "samples", "tasks"]) -> Weights:
    """Multiply Fisher information by the task's weight in a sum over tasks."""
    counts = {"classes": task.taught, "samples": len(task.train), "tasks": 1}[by]
    return {key: value * counts for key, value in fisher.items()}


def add_fisher(total: Weights, fisher: Weights) -> Weights:
    """Add a task to a sum over tasks; the values of new weights are copied."""
    return {key: _sum(total[key], value) if key in total else value for key, value in fisher.items()}


def _sum(total: Tensor, value: Tensor) -> Tensor:
    """Return the sum; if a tensor has grown, the values of its new rows are copied."""
    if total.shape == value.shape:
        return total + value
    grown = value.clone()
    grown[: len(total)] += total
    return grown


def _drawn(part: distributed.Shard, batch: int, generator: torch.Generator) -> Iterator[float]:
    """Return the random numbers for this shard's labels: the same that a single process would draw."""
    sizes = [len(at) for at in ordered_batches(part.whole, batch)]
    numbers = [torch.rand(size, generator=generator, dtype=torch.float64) for size in sizes]
    return iter(torch.cat(numbers)[part.rows].tolist())


def _augmented(
    task: Task, context: Context, order: list[Tensor], part: distributed.Shard
) -> Iterator[tuple[Tensor, Tensor]]:
    augment = context.seeds.generator("fisher augment", task.index)
    for index in order[: part.start]:  # advance the generator past the batches of other processes
        context.view.train(task.train.batch(index[:0])[0], augment, distributed.Shard(0, 0, len(index)))
    for index in context.progress.track(order[part.rows], part.stop - part.start, "fisher"):
        pixels, labels = task.train.batch(index)
        with torch.no_grad():
            images = context.view.train(pixels.to(context.device), augment)
        yield images, labels.to(context.device)
        context.progress.worked(STEP * FISHER_PASS * len(index))
