"""Squared gradients of a few samples together, each as if it were alone, by ``torch.func.vmap``.

It needs no rules, and so no verification, which would cost more than all gradients of a few samples. Its
gradients take the memory of one model each.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from cofima.weights.fisher.inputs import Inputs
from cofima.weights.fisher.labels import Labels
from cofima.weights.fisher.reference import require_grad
from cofima.weights.ops import Weights

_SPARE = 1 << 26  # elements of the gradients that are held together


def add_together(model: nn.Module, images: Inputs, picks: Tensor, labels: Labels, totals: Weights) -> int:
    """Add the squared gradient of every sample, while it can be had; return how many were added.

    Not every model can be vectorized, and one that holds a parameter elsewhere than in its modules would
    miss the gradient of that use: then its outputs still require a gradient of the parameter itself.
    """
    at_once = _SPARE // max(1, sum(total.numel() for total in totals.values()))
    if not isinstance(images, Tensor) or picks.ndim > 1 or labels.mode == "exact" or at_once < 2:
        return 0
    if len(picks) == 1:
        return 0  # the obvious way is as fast
    done = 0
    with require_grad(model, set(totals)) as params, _same_attributes(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # functions without a rule of their own are slower, and as right
        try:
            for some in zip(torch.split(images, at_once), torch.split(picks, at_once), strict=True):
                grads = _gradients(model, params, *some, labels)
                if not grads:
                    return done
                for name, values in grads.items():
                    for one in values:
                        totals[name].addcmul_(one, one)
                done += len(some[1])
        except Exception:
            return done  # whatever is wrong with the model or its inputs, the other ways tell
    return done


def _gradients(model: nn.Module, params: Weights, images: Tensor, picks: Tensor, labels: Labels) -> Weights:
    """Return the gradients of all samples, or nothing where some would be missing."""

    def likelihood(weights: Weights, image: Tensor, pick: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(model, (weights, buffers), (image[None],))
        return (logits * labels.direction(logits.detach(), pick[None])).sum(), logits[0]

    buffers, frozen = dict(model.named_buffers()), {name: p.detach() for name, p in params.items()}
    each = vmap(grad(likelihood, has_aux=True), in_dims=(None, 0, 0))
    grads, logits = each(frozen, images, picks)
    labels.check_targets(labels.checked(logits, picks), picks)
    missing = logits.requires_grad or any(values.requires_grad for values in grads.values())
    return {} if missing else grads


@contextmanager
def _same_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules: a tensor that one keeps means nothing outside of vmap."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
