r"""Drift of old classes' statistics, estimated from images that the old and the new backbone both see.

:math:`F_0` [n, d] are the features of the current task's images under the backbone in which the statistics
are expressed, :math:`F_1` those of the same images under the one that replaces it. Old classes move by

.. math:: A = I + E, \qquad E = (F_0^\top F_0 + \rho I)^{-1} F_0^\top (F_1 - F_0), \qquad
          \rho = \alpha \operatorname{tr}(F_0^\top F_0) / d

There is no offset: in directions that no image shows, features stay where they are instead of being moved
all alike. Few images cannot throw the means away either, as
:math:`\lVert E \rVert \le \lVert F_1 - F_0 \rVert / (2 \sqrt\rho)`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cofima.methods.components.eigen import eigh

ALPHAS = (0.01, 0.1, 1.0, 10.0, 100.0)
ONE_CLASS = 1.0  # alpha where no class can be left out


def drift_map(before: Tensor, after: Tensor, alpha: float) -> Tensor:
    """Return A [d, d], in double precision; a feature as a row vector moves to ``x @ A``."""
    before, after = before.double(), after.double()
    count, width = before.shape
    rho = _rho(before, alpha)
    if count < width:
        gram = before @ before.T
        gram.diagonal().add_(rho)
        moved = before.T @ torch.cholesky_solve(after - before, _factor(gram))
    else:
        gram = before.T @ before
        gram.diagonal().add_(rho)
        moved = torch.cholesky_solve(before.T @ (after - before), _factor(gram))
    return torch.eye(width, dtype=torch.float64) + moved


def choose_alpha(before: Tensor, after: Tensor, labels: Tensor) -> float:
    """Return the alpha whose map is best on a class that it has not seen, each left out once.

    That is how the map is used: on classes of which there are no images.
    """
    if len(torch.unique(labels)) < 2:
        return ONE_CLASS
    errors = [residual.square().sum() for residual in left_out_residuals(before, after, labels, ALPHAS)]
    return ALPHAS[int(torch.stack(errors).argmin())]


def left_out_residuals(
    before: Tensor, after: Tensor, labels: Tensor, alphas: Sequence[float]
) -> Iterator[Tensor]:
    r"""Yield, for each alpha, what is missing to F_1 where each class is moved by the map of the others.

    In closed form: with the hat matrix :math:`H = F_0 (F_0^\top F_0 + \rho I)^{-1} F_0^\top`, the residuals
    of a class that is left out are :math:`(I - H_{cc})^{-1}` times those of the map of all.
    """
    before = before.double()
    moved = after.double() - before
    count, width = before.shape
    if count < width:
        values, vectors = eigh(before @ before.T)
        basis = vectors * values.clamp(min=0).sqrt()
    else:
        values, vectors = eigh(before.T @ before)
        basis = before @ vectors
    values, cross = values.clamp(min=0), basis.T @ moved
    for alpha in alphas:
        weights = 1 / (values + _rho(before, alpha))
        residual = moved - basis @ (weights[:, None] * cross)
        for label in torch.unique(labels):
            mine = labels == label
            hat = (basis[mine] * weights) @ basis[mine].T
            residual[mine] = torch.linalg.solve(torch.eye(len(hat), dtype=hat.dtype) - hat, residual[mine])
        yield residual


def _rho(before: Tensor, alpha: float) -> float:
    scale = float(before.square().sum()) / before.shape[1]
    return alpha * scale if scale else 1.0  # features that are all 0 do not move


def _factor(gram: Tensor) -> Tensor:
    factor: Tensor = torch.linalg.cholesky(gram)
    return factor
