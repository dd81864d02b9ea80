"""Decompositions by the fast algorithm, and by the slow one where that fails."""

from functools import partial

import pytest
import torch
from torch import Tensor

from cofima.weights.decompositions import eigh, svd


def fails(*_: object, **__: object) -> None:
    raise torch.linalg.LinAlgError("failed to converge")


def few_directions(images: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return features that are 0 but for a few of them."""
    features = torch.zeros(images, width, dtype=dtype)
    features[:, :5] = torch.randn(images, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    return features


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("converges", [True, False])
def test_a_decomposition_gives_the_matrix_back(
    converges: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = few_directions(12, 40, dtype)
    scatter = features.T @ features
    if not converges:
        monkeypatch.setattr(torch.linalg, "eigh", fails)
        monkeypatch.setattr(torch.linalg, "svd", fails)
    values, vectors = eigh(scatter)
    assert values.dtype == vectors.dtype == dtype
    assert (values.diff() >= 0).all()
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    close((vectors * values) @ vectors.T, scatter)
    close(vectors.T @ vectors, torch.eye(40, dtype=dtype))
    u, lengths, vh = svd(features)
    assert u.dtype == lengths.dtype == vh.dtype == dtype
    close((u * lengths) @ vh, features)
    close(lengths[:5].square().flip(0), values[-5:])
