"""Squared per-sample gradients of few samples by torch's own vectorization, which needs no verification.

For a dozen samples, verifying the fast rules on a new network costs more than the information itself.
"""

import warnings

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from cofima.core.errors import CofimaError
from cofima.weights.fisher.inputs import Inputs
from cofima.weights.fisher.labels import Labels
from cofima.weights.ops import Weights

FEW = 12
"""Up to so many samples, vectorized gradients of all of them cost less than verifying two."""


def add_few(model: nn.Module, images: Inputs, picks: Tensor, labels: Labels, totals: Weights) -> bool:
    """Add the squared gradients of all parameters for one batch; return False if torch cannot vectorize it.

    Nothing is added then. Covered are models of one tensor and one label per sample. Hooks might keep torch's
    placeholders: models that have any are not covered.
    """
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if hooked or not isinstance(images, Tensor) or picks.ndim != 1 or labels.mode == "exact":
        return False
    params = {n: p.detach() for n, p in model.named_parameters() if p.is_floating_point()}

    def log_probability(params: Weights, image: Tensor, pick: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(model, params, image[None])
        return labels.log_probability(logits, pick[None]).sum(), logits[0]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells of operations that it computes one by one
            each = vmap(grad(log_probability, has_aux=True), in_dims=(None, 0, 0))
            grads, logits = each(params, images, picks)
        labels.checked(logits, picks)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, CofimaError):
        return False  # the caller computes one by one, and says what is wrong if anything is
    for name, found in grads.items():
        totals[name] += found.square().sum(0)
    return True
