"""Reference implementation of squared gradients: one forward and backward pass per sample.

It makes no assumptions about the model. The fast rules are verified against it, and it computes the
parameters that they do not cover.
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cofima.weights.fisher.inputs import Inputs, take
from cofima.weights.fisher.labels import Labels
from cofima.weights.ops import Weights


def add_each(
    model: nn.Module, names: Set[str], images: Inputs, picks: Tensor, labels: Labels, totals: Weights
) -> None:
    """Add the squared per-sample gradients of the parameters ``names``, one sample at a time."""
    for i in range(len(picks)):
        one = slice(i, i + 1)
        add_mean(model, names, take(images, one, len(picks)), picks[one], labels, totals)


def add_mean(
    model: nn.Module, names: Set[str], images: Inputs, picks: Tensor, labels: Labels, totals: Weights
) -> None:
    """Add the square of the mean gradient over ``images``, for the parameters ``names``."""
    with require_grad(model, names) as params:
        logits = labels.checked(model(images), picks)
        if not logits.requires_grad:
            return
        for direction, more in labels.directions(logits.detach(), picks):
            direction /= len(picks)  # for a single image, this is the per-sample gradient
            grads = torch.autograd.grad(
                logits, list(params.values()), direction, retain_graph=more, allow_unused=True
            )
            for name, grad in zip(params, grads, strict=True):
                if grad is not None:
                    dense = grad.to_dense() if grad.layout != torch.strided else grad
                    totals[name].addcmul_(dense, dense)


@contextmanager
def require_grad(model: nn.Module, names: Set[str]) -> Iterator[Weights]:
    """Enable gradients of the frozen parameters ``names`` within the context."""
    params = {n: p for n, p in model.named_parameters() if n in names and p.is_floating_point()}
    for p in params.values():
        p.requires_grad_(True)
    try:
        yield dict(params)
    finally:
        for p in params.values():
            p.requires_grad_(False)
