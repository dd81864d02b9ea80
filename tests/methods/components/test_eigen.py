"""Eigenvalues are found by another way where the first gives up."""

import pytest
import torch

from cofima.methods.components.eigen import eigh


def test_another_algorithm_takes_the_place_of_one_that_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = rows.T @ rows  # five eigenvalues of 0
    fast, vectors = eigh(matrix)
    assert torch.equal(vectors, torch.linalg.eigh(matrix)[1])  # the same bits as ever

    def gives_up(_: torch.Tensor) -> None:
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    slow, vectors = eigh(matrix)
    torch.testing.assert_close(slow, fast)
    torch.testing.assert_close((vectors * slow) @ vectors.T, matrix)
    assert (slow.dtype, vectors.dtype) == (matrix.dtype, matrix.dtype)
