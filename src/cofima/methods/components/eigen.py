"""Eigenvalues of symmetric matrices, also where the fast algorithm does not converge."""

import torch
from scipy.linalg import eigh as slow_eigh
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, smallest first, and eigenvectors, as ``torch.linalg.eigh`` does.

    Its algorithm (divide and conquer) gives up on some matrices of many equal eigenvalues, as features that
    are 0 in most images make them, and on some processors only. The iteration that takes its place then is
    several times slower, and converges.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        found = slow_eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(each).to(matrix) for each in found)
    return values, vectors
