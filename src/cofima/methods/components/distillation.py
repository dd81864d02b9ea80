"""Knowledge distillation from a frozen copy of the network, the teacher."""

import copy

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from cofima.models.net import Net


def teacher_of(net: Net) -> Net:
    """Return a frozen copy of ``net`` in eval mode."""
    return copy.deepcopy(net).eval().requires_grad_(False)


def distillation(logits: Tensor, teacher: Tensor, temperature: float, *, squared: bool = False) -> Tensor:
    r"""Return the cross-entropy between softened predictions and the teacher's, averaged over images.

    .. math:: -\frac1N \sum_i \sum_k \mathrm{softmax}(\hat z_i / T)_k \log \mathrm{softmax}(z_i / T)_k

    Its gradient shrinks roughly as :math:`1/T^2`; ``squared`` multiplies by :math:`T^2` to compensate.
    """
    target = softmax(teacher.float() / temperature, dim=1)
    loss = -(target * log_softmax(logits.float() / temperature, dim=1)).sum(1).mean()
    return loss * temperature**2 if squared else loss


def known_mse(logits: Tensor, old: Tensor, known: Tensor) -> Tensor:
    """Return the mean squared difference over the logits that existed when each image was stored."""
    there = torch.arange(old.shape[1], device=old.device) < known[:, None]
    return ((logits[:, : old.shape[1]] - old).square() * there).sum() / there.sum()
