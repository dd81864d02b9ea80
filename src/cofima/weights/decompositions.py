"""Eigenvalues and singular values that are found for every finite matrix.

The fast algorithms of LAPACK (divide and conquer) may fail to converge where many eigenvalues are equal, as
those of features that are 0 for all images. Which matrices fail depends on the processor. The older
algorithms, by QR iterations, take longer and converge.
"""

import torch
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of a symmetric matrix, in ascending order, and its eigenvectors as columns."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        from scipy import linalg  # here: it is hardly ever needed

        found = linalg.eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(part).to(matrix) for part in found)
    return values, vectors


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition: U, the singular values, and V transposed."""
    try:
        u, lengths, vh = torch.linalg.svd(matrix, full_matrices=False)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        from scipy import linalg

        found = linalg.svd(matrix.cpu().numpy(), full_matrices=False, lapack_driver="gesvd")
        u, lengths, vh = (torch.from_numpy(part).to(matrix) for part in found)
    return u, lengths, vh
