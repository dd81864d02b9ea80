r"""Classifier alignment: train the whole head on features drawn from every class's Gaussian.

Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained
Model", ICCV 2023, https://arxiv.org/abs/2303.05118. Cross-entropy on normalized logits,

.. math:: \mathrm{CE}\big(z / (n(z)\,\tau),\ y\big), \qquad
          n(z) = \frac1t \sum_k \left(\lVert z_{[k]} \rVert_2 + 10^{-7}\right)

with :math:`z_{[k]}` the logits of task :math:`k`.
"""

import copy
from collections.abc import Iterator
from typing import Annotated, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.core.seeds import Seeds
from cofima.methods.components.gaussians import Gaussians, Sampler
from cofima.methods.state import Entry
from cofima.models.head import Head

AT_ONCE = 2**27  # numbers of drawn features in memory, half a gigabyte: more than the paper's settings need

RAW_HEAD = Entry("raw_head.", axis="class", merge="average")


class AlignOptions(BaseModel):
    """Options of the alignment. The defaults are SLCA's."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=0)] = 5
    """Passes over fresh features; 0 leaves the alignment out."""
    samples_per_class: Annotated[int, Field(ge=1)] = 256
    """Features drawn for each class in each epoch; also the batch size."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate at the start; it falls along a cosine, epoch by epoch."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of the head."""
    temperature: Annotated[float, Field(gt=0)] = 0.1
    """Divides the normalized logits; the fewer classes, the larger it must be."""
    shrink: bool = True
    """Shrink a class's covariance where its images are fewer than a quarter of the features' width."""


class AlignContext(Protocol):
    """The part of a training context that an alignment needs."""

    @property
    def seeds(self) -> Seeds:
        """Random streams."""

    @property
    def device(self) -> torch.device:
        """The device of the head."""

    @property
    def progress(self) -> Progress:
        """Receives the epochs."""


def align(
    head: Head,
    gaussians: Gaussians,
    scale: Tensor | None,
    how: AlignOptions,
    context: AlignContext,
    task: int,
) -> Head:
    """Return an aligned copy of ``head``; the head itself does not change.

    Args:
        head: The head, whose blocks are the tasks.
        gaussians: The Gaussian of each class.
        scale: The scale of each class's mean, if not 1.
        how: Options of the alignment.
        context: The training context.
        task: The task's index.
    """
    aligned = copy.deepcopy(head)
    if how.epochs == 0:
        return aligned
    flat = {k: v.requires_grad_() for k, v in head.flat().items()}
    sampler = Sampler(gaussians, context.device, scale)
    optimizer = torch.optim.SGD(flat.values(), how.lr, how.momentum, weight_decay=how.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs)
    spans = head.spans
    for epoch in context.progress.track(range(how.epochs), how.epochs, "align"):
        drawn = _batches(sampler, len(gaussians), how.samples_per_class, context.seeds, task, epoch)
        for features, labels in drawn:
            logits = linear(features, flat["weight"], flat["bias"])
            loss = cross_entropy(logits / (logit_norm(logits, spans) * how.temperature), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        schedule.step()
    if not all(bool(torch.isfinite(value).all()) for value in flat.values()):
        raise CofimaError(
            f"the alignment after task {task + 1} diverged; the state after the task before is kept. "
            "Try a smaller options.align.lr."
        )
    aligned.load_flat(flat["weight"].detach(), flat["bias"].detach())
    return aligned


def logit_norm(logits: Tensor, spans: list[slice]) -> Tensor:
    """Return the mean over tasks of the norm of each sample's logits of that task."""
    norms = [
        torch.linalg.vector_norm(logits[:, span], dim=1) + 1e-7 for span in spans if span.stop > span.start
    ]
    return torch.stack(norms).mean(0)[:, None]


def task_of_class(head: Head) -> Tensor:
    """Return the 0-based task of each class."""
    return torch.repeat_interleave(torch.tensor(head.sizes))


def _batches(
    sampler: Sampler, classes: int, samples: int, seeds: Seeds, task: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw one epoch of features, shuffled, in as many batches as there are classes.

    An epoch that is larger than memory should hold is drawn in several rounds, each with features of every
    class, and is shuffled within each.
    """
    chance, shuffle = seeds.generator("gaussians", task, epoch), seeds.generator("alignment", task, epoch)
    most = max(1, AT_ONCE // (classes * sampler.means.shape[1]))
    for some in torch.tensor_split(torch.arange(samples), -(-samples // most)):
        features, labels = sampler.draw([len(some)] * classes, chance)
        order = torch.randperm(len(labels), generator=shuffle).to(labels.device)
        for at in torch.split(order, samples):
            yield features[at], labels[at]
