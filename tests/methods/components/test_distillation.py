"""Distillation, the quadratic pull and the bias correction, against computations by hand."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.methods.bic import Correction, fit_correction
from cofima.methods.components.distillation import distillation, known_mse
from cofima.methods.ewc import quadratic


def test_distillation_by_hand() -> None:
    z, old, t = [1.0, -1.0], [0.5, 2.0], 2.0
    weights = [math.exp(v / t) for v in old]
    logs = [v / t - math.log(sum(math.exp(w / t) for w in z)) for v in z]
    expected = -sum(w / sum(weights) * log for w, log in zip(weights, logs, strict=True))
    found = distillation(torch.tensor([z, z]), torch.tensor([old, old]), t)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    assert distillation(torch.tensor([z]), torch.tensor([old]), t, squared=True).item() == pytest.approx(
        4 * expected
    )


def test_distillation_is_smallest_at_the_teacher_and_averages_over_images() -> None:
    old = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    z = old.clone().requires_grad_()
    loss = distillation(z, old, 2.0)
    (gradient,) = torch.autograd.grad(loss, z)
    assert gradient.abs().max() < 1e-7
    each = torch.stack([distillation(old[i : i + 1] * 2, old[i : i + 1], 2.0) for i in range(5)])
    torch.testing.assert_close(distillation(old * 2, old, 2.0), each.mean())


def test_old_logits_are_compared_where_they_existed() -> None:
    now = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, 9.0]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    loss = known_mse(now, old, torch.tensor([1, 3]))
    assert loss.item() == pytest.approx((1 + 1 + 4 + 9) / 4)
    loss.backward()
    assert (now.grad != 0).tolist() == [[True, False, False, False], [True, True, True, False]]


def test_the_quadratic_and_its_gradient_are_the_analytic_ones() -> None:
    rng = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    weights = [torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in shapes]
    center, importance = (
        [torch.rand(s, generator=rng, dtype=torch.float64) for s in shapes] for _ in range(2)
    )
    value = quadratic(weights, center, importance)
    slow = sum((f * (w - c) ** 2).sum() / 2 for w, c, f in zip(weights, center, importance, strict=True))
    torch.testing.assert_close(value, slow)
    for mine, other in zip(
        torch.autograd.grad(7 * value, weights), torch.autograd.grad(7 * slow, weights), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_a_planted_bias_is_recovered() -> None:
    """Labels are drawn from the softmax of corrected logits: their alpha and beta must come back."""
    rng = torch.Generator().manual_seed(0)
    logits, alpha, beta = 2 * torch.randn(20_000, 6, generator=rng), 0.6, -1.2
    true = torch.cat([logits[:, :4], alpha * logits[:, 4:] + beta], 1)
    labels = torch.multinomial(true.softmax(1), 1, generator=rng).flatten()
    found = fit_correction(logits, labels, 4, Correction(epochs=10), 128, rng)
    assert found == pytest.approx((alpha, beta), abs=0.06)


def test_the_default_fit_ends_at_the_minimum_and_none_is_the_identity() -> None:
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 6, generator=rng)
    labels = (logits + torch.randn(200, 6, generator=rng)).argmax(1)
    shifted = torch.cat([logits[:, :3], 2 * logits[:, 3:] + 1.5], 1)
    alpha, beta = fit_correction(shifted, labels, 3, Correction(), 128, rng)

    def loss(a: float, b: float) -> float:
        return cross_entropy(torch.cat([shifted[:, :3], a * shifted[:, 3:] + b], 1), labels).item()

    grid = min(loss(a / 20, b / 20) for a in range(0, 41) for b in range(-60, 41))
    assert loss(alpha, beta) < grid + 2e-3 < loss(1, 0)
    assert fit_correction(shifted, labels, 3, Correction(epochs=0), 128, rng) == (1, 0)
    assert fit_correction(shifted[:0], labels[:0], 3, Correction(), 128, rng) == (1, 0)
