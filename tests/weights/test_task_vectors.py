"""Task arithmetic and TIES against slow, obvious definitions."""

import pytest
import torch
from torch import Tensor

from cofima.weights.task_vectors import magnitudes, task_arithmetic, threshold, ties


def normal(seed: int, size: int = 200) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def slow_ties(base: Tensor, models: list[Tensor], density: float, weights: list[float], lam: float) -> Tensor:
    """TIES number by number, as the paper's Algorithm 1 says it."""
    trimmed = []
    for model in models:
        vector = [float(m) - float(b) for m, b in zip(model, base, strict=True)]
        order = sorted(range(len(vector)), key=lambda i: -abs(vector[i]))
        kept = set(order[: max(1, int(density * len(vector)))])
        trimmed.append([v if i in kept else 0.0 for i, v in enumerate(vector)])
    merged = []
    for i, start in enumerate(base.tolist()):
        total = sum(w * vector[i] for w, vector in zip(weights, trimmed, strict=True))
        sign = (total > 0) - (total < 0)
        agree = [(w, v[i]) for w, v in zip(weights, trimmed, strict=True) if v[i] * sign > 0]
        mean = sum(w * v for w, v in agree) / sum(w for w, _ in agree) if agree else 0.0
        merged.append(start + lam * mean)
    return torch.tensor(merged, dtype=torch.float64)


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 0.5, 0.3]])
@pytest.mark.parametrize("lam", [1.0, 0.7, 1.5])
def test_ties_is_the_paper_s(density: float, weights: list[float], lam: float) -> None:
    base, models = normal(0), [normal(seed) for seed in (1, 2, 3)]
    least = [threshold(lambda m=m: [magnitudes(base, m)], 200, density) for m in models]
    found = ties(base, models, least, weights, lam)
    torch.testing.assert_close(found, slow_ties(base, models, density, weights, lam), rtol=1e-12, atol=1e-12)


def test_where_signs_cancel_the_base_stays() -> None:
    base = torch.tensor([1.0, 1.0])
    found = ties(base, [base + 1, base - torch.tensor([1.0, 2.0])], [0, 0], [1, 1], 1.0)
    assert found.tolist() == [1.0, -1.0]


def test_one_model_untrimmed_is_task_arithmetic_bit_for_bit() -> None:
    base, model = normal(0), normal(1) * 1e-6
    for lam in (0.3, 1.0, 2.0):
        assert torch.equal(ties(base, [model], [0.0], [1.0], lam), task_arithmetic(base, [model], [lam]))


def test_scale_one_is_the_model_and_scale_zero_the_base_bit_for_bit() -> None:
    base, model = normal(0) * 1e6, normal(1) * 1e-6
    assert torch.equal(task_arithmetic(base, [model], [1.0]).float(), model)
    assert torch.equal(task_arithmetic(base, [model], [0.0]).float(), base)


def test_task_arithmetic_is_the_sum_of_vectors() -> None:
    base, models, scales = normal(0), [normal(1), normal(2)], [0.4, -0.3]
    vectors = sum(s * (m.double() - base.double()) for s, m in zip(scales, models, strict=True))
    torch.testing.assert_close(task_arithmetic(base, models, scales), base.double() + vectors)


@pytest.mark.parametrize("density", [0.001, 0.1, 0.37, 0.999])
def test_the_threshold_is_the_exact_order_statistic_over_all_pieces(density: float) -> None:
    values = (normal(5, 10_000) * torch.logspace(-30, 6, 10_000)).abs()
    values[:50] = values[100]  # ties
    values[60:80] = 0
    pieces = values.split(777)
    expected = values.sort(descending=True).values[max(1, int(density * 10_000)) - 1]
    assert threshold(lambda: pieces, 10_000, density) == float(expected)


def test_all_is_kept_at_density_one_and_nothing_is_no_error() -> None:
    assert threshold(lambda: [torch.rand(3)], 3, 1.0) == 0
    assert threshold(lambda: [], 0, 0.5) == 0
