r"""A quadratic pull of every weight towards a centre, at the cost of a few passes over the weights.

.. math:: \tfrac12 \sum_i F_i\, (\theta_i - c_i)^2
"""

from typing import Any

import torch
from torch import Tensor


def quadratic(weights: list[Tensor], centre: list[Tensor], importance: list[Tensor]) -> Tensor:
    """Return half the sum of squared distances from ``centre``, each times its importance."""
    value: Tensor = _Quadratic.apply(centre, importance, *weights)
    return value


class _Quadratic(torch.autograd.Function):
    """The gradient, importance times distance, is already there when the value is: it is kept, not traced."""

    @staticmethod
    def forward(ctx: Any, centre: list[Tensor], importance: list[Tensor], *weights: Tensor) -> Tensor:
        moved = torch._foreach_sub(weights, centre)
        ctx.pull = torch._foreach_mul(moved, importance)
        parts = [torch.dot(m.flatten(), p.flatten()) for m, p in zip(moved, ctx.pull, strict=True)]
        return 0.5 * torch.stack(parts).sum()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *torch._foreach_mul(ctx.pull, gradient[0])
