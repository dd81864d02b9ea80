"""Distillation losses against computations by hand."""

import math

import pytest
import torch

from cofima.methods.components.distillation import distillation, known_mse


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
