r"""Bias correction: two numbers that make the logits of new classes fair towards old ones.

.. math:: q_k = z_k \text{ for old classes}, \qquad q_k = \alpha z_k + \beta \text{ for new ones}
"""

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.data.image_set import Images
from cofima.models.net import Net
from cofima.training.context import Context
from cofima.training.loop import batches, plain_batches


class Correction(BaseModel):
    """How the correction is fitted, with Adam on cached logits."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=0)] = 200
    """Passes over the images held out; 0 leaves the correction out."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of Adam."""


def correct(net: Net, images: Images, how: Correction, context: Context, task: int) -> tuple[float, float]:
    """Fit alpha and beta of the newest classes on ``images``; write them into their rows, and return them."""
    with torch.inference_mode():
        pairs = [(net(x).float(), y) for x, y in plain_batches(images, context, "correct")]
    logits, labels = (torch.cat(part).clone() for part in zip(*pairs, strict=True))
    generator, old = context.seeds.generator("correction", task), net.head.spans[-1].start
    alpha, beta = fit_correction(logits, labels, old, how, context.train.batch_size, generator)
    with torch.no_grad():
        weight, bias = net.head.blocks[-1].parameters()
        weight.mul_(alpha)
        bias.mul_(alpha).add_(beta)
    return alpha, beta


def fit_correction(
    logits: Tensor, labels: Tensor, old: int, how: Correction, batch: int, generator: torch.Generator
) -> tuple[float, float]:
    """Return alpha and beta of the classes after the first ``old``, fitted by cross-entropy from 1 and 0."""
    alpha = torch.ones((), device=logits.device, requires_grad=True)
    beta = torch.zeros((), device=logits.device, requires_grad=True)
    optimizer = torch.optim.Adam([alpha, beta], how.lr)
    for _ in range(how.epochs):
        for index in batches(len(labels), batch, generator) if len(labels) else []:
            at = index.to(logits.device)
            corrected = torch.cat([logits[at, :old], alpha * logits[at, old:] + beta], dim=1)
            loss = cross_entropy(corrected, labels[at])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    return float(alpha.detach()), float(beta.detach())
