r"""Classifier alignment: train the whole head on features drawn from the Gaussians of all classes.

Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained
Model", ICCV 2023, https://arxiv.org/abs/2303.05118. Cross-entropy on normalized logits,

.. math:: \mathrm{CE}\big(z / (n(z)\,\tau),\ y\big), \qquad
          n(z) = \frac1t \sum_k \left(\lVert z_{[k]} \rVert_2 + 10^{-7}\right)

with :math:`z_{[k]}` the logits of task :math:`k`. Steps are many and small, so the gradient is computed
explicitly instead of by autograd: with :math:`g = \mathrm{softmax}(z / (n \tau)) - e_y` and the task
:math:`k` of class :math:`c`,

.. math:: \frac{\partial\, \mathrm{CE}}{\partial z_c} = \frac{1}{n \tau} \left(g_c -
          \frac{g \cdot z}{n}\, \frac{z_c}{t\, \lVert z_{[k]} \rVert_2}\right)
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import linear, one_hot

from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.core.seeds import Seeds
from cofima.methods.components.gaussians import Gaussians, Sampler
from cofima.methods.state import Entry
from cofima.models.head import Head

AT_ONCE = 2**27  # elements of drawn features in memory, half a gigabyte: the paper's settings need less

RAW_HEAD = Entry("raw_head.", axis="class", merge="average")


class AlignOptions(BaseModel):
    """Options of the alignment. The defaults are SLCA's."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=0)] = 5
    """Epochs, each on newly drawn features; 0 disables the alignment."""
    samples_per_class: Annotated[int, Field(ge=1)] = 256
    """Features drawn per class and epoch; also the batch size."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Initial learning rate; it decays along a cosine, per epoch."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of the head."""
    temperature: Annotated[float, Field(gt=0)] = 0.1
    """Temperature of the normalized logits; the fewer classes, the larger it must be."""
    shrink: bool = True
    """Shrink the covariance of a class with fewer images than a quarter of the feature dimension."""


class AlignContext(Protocol):
    """The part of a training context that an alignment needs."""

    @property
    def seeds(self) -> Seeds:
        """Seeds of the random number generators."""

    @property
    def device(self) -> torch.device:
        """Device of the head."""

    @property
    def progress(self) -> Progress:
        """Progress display of the epochs."""


def align(
    head: Head,
    gaussians: Gaussians,
    scale: Tensor | None,
    how: AlignOptions,
    context: AlignContext,
    task: int,
) -> Head:
    """Return an aligned copy of ``head``; the head itself is not changed.

    Args:
        head: The head, with one block per task.
        gaussians: Gaussian of each class.
        scale: Scale of each class's mean; None means 1.
        how: Options of the alignment.
        context: The training context.
        task: Index of the task.
    """
    aligned = copy.deepcopy(head)
    if how.epochs == 0:
        return aligned
    weight, bias = head.flat().values()
    speeds = [torch.zeros_like(weight), torch.zeros_like(bias)]
    sampler = Sampler(gaussians, context.device, scale)
    member = membership(head.sizes, weight)
    for epoch in context.progress.track(range(how.epochs), how.epochs, "align"):
        rate = how.lr * (1 + math.cos(math.pi * epoch / how.epochs)) / 2
        drawn = _batches(sampler, len(gaussians), how.samples_per_class, context.seeds, task, epoch)
        for features, labels in drawn:
            at_logits = loss_gradient(linear(features, weight, bias), labels, member, how.temperature)
            gradients = at_logits.T @ features, at_logits.sum(0)
            for value, speed, gradient in zip((weight, bias), speeds, gradients, strict=True):
                speed.mul_(how.momentum).add_(gradient.add_(value, alpha=how.weight_decay))
                value.sub_(speed, alpha=rate)
    if not all(bool(torch.isfinite(value).all()) for value in (weight, bias)):
        raise CofimaError(
            f"the alignment after task {task + 1} diverged; the state after the task before is kept. "
            "Try a smaller options.align.lr."
        )
    aligned.load_flat(weight, bias)
    return aligned


def loss_gradient(logits: Tensor, labels: Tensor, member: Tensor, temperature: float) -> Tensor:
    """Return the gradient of the mean loss over a batch at the logits; ``member``: :func:`membership`."""
    norms = task_norms(logits, member)
    norm = norms.mean(1, keepdim=True) + 1e-7
    gradient = torch.softmax(logits / (norm * temperature), 1)
    gradient[torch.arange(len(labels), device=labels.device), labels] -= 1
    along = (gradient * logits).sum(1, keepdim=True) / norm
    # if all logits of a task are 0, its norm has no gradient
    pull = torch.where(norms > 0, along / norms, 0) @ (member.T / member.shape[1])
    return gradient.addcmul_(pull, logits, value=-1).div_(norm * (temperature * len(labels)))


def task_norms(logits: Tensor, member: Tensor) -> Tensor:
    """Return the norm of the logits per sample and task [samples, tasks]."""
    return (logits.square() @ member).sqrt()


def membership(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return a one-hot matrix of each class's task [classes, tasks], without tasks that lost all classes."""
    kept = torch.tensor([size for size in sizes if size], device=like.device)
    return one_hot(torch.repeat_interleave(kept)).to(like.dtype)


def task_of_class(head: Head) -> Tensor:
    """Return the 0-based task of each class."""
    return torch.repeat_interleave(torch.tensor(head.sizes))


def _batches(
    sampler: Sampler, classes: int, samples: int, seeds: Seeds, task: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw one epoch of features, shuffled, in as many batches as there are classes.

    An epoch of more than ``AT_ONCE`` elements is drawn in several rounds, each with features of every class
    and shuffled separately.
    """
    chance, shuffle = seeds.generator("gaussians", task, epoch), seeds.generator("alignment", task, epoch)
    most = max(1, AT_ONCE // (classes * sampler.means.shape[1]))
    for some in torch.tensor_split(torch.arange(samples), -(-samples // most)):
        features, labels = sampler.draw([len(some)] * classes, chance)
        order = torch.randperm(len(labels), generator=shuffle).to(labels.device)
        for at in torch.split(order, samples):
            yield features[at], labels[at]
