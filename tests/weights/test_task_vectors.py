"""Merges of task vectors against slow, obvious definitions."""

import pytest
import torch
from torch import Tensor

from cofima.weights.task_vectors import (
    band,
    breadcrumbs,
    dare,
    larger,
    largest_vector,
    magnitudes,
    model_stock,
    products,
    stock_share,
    task_arithmetic,
    threshold,
    ties,
)


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


# --- MagMax, Model Stock, Breadcrumbs, DARE ---------------------------------------------------------


def test_magmax_takes_the_largest_change_number_by_number() -> None:
    base, models = normal(0), [normal(seed) for seed in (1, 2, 3)]
    expected = []
    for start, *ends in zip(base.tolist(), *(m.tolist() for m in models), strict=True):
        expected.append(start + 0.7 * max((end - start for end in ends), key=abs))
    torch.testing.assert_close(largest_vector(base, models, 0.7), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(largest_vector(base, models[:1], 1.0).float(), models[0])
    assert torch.equal(largest_vector(base, models, 0.0).float(), base)


def test_of_equal_magnitudes_the_later_counts() -> None:
    assert larger(torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-1.0, 1.0, 1.0])).tolist() == [-1.0, 1.0, 2.0]


def test_model_stock_of_two_is_the_foot_of_the_perpendicular() -> None:
    """The paper's geometry: task vectors of equal length, and a center that each is perpendicular to."""
    start, a, b = normal(0, 50).double(), normal(1, 50).double(), normal(2, 50).double()
    a, b = a + 0.8 * normal(3, 50), b + 0.8 * normal(3, 50)
    a, b = a / a.norm(), b / b.norm()
    share = stock_share(products(start, [start + a, start + b]))
    cosine = float(a @ b)
    assert share == pytest.approx(2 * cosine / (1 + cosine))
    merged = model_stock(start, [start + a, start + b], share)
    torch.testing.assert_close(merged, start + share * (a + b) / 2)
    # the triangle of base and two models is the paper's: at the merge, with the center behind it, the
    # vectors to base and to center are orthogonal for a center with equal products to both models
    center = start + (a + b) * cosine / (1 + cosine) + _across(a, b, cosine)
    assert float((merged - start) @ (center - merged)) == pytest.approx(0, abs=1e-9)
    for model in (a, b):
        assert float((start + model - center) @ (center - start)) == pytest.approx(0, abs=1e-9)


def _across(a: Tensor, b: Tensor, cosine: float) -> Tensor:
    """Return the part of the center outside the plane: its square equals its product with a model."""
    inside = (a + b) * cosine / (1 + cosine)
    missing = float(a @ inside) - float(inside @ inside)
    away = torch.linalg.qr(torch.stack([a, b, normal(5, 50).double()], 1)).Q[:, 2]
    return away * missing**0.5


@pytest.mark.parametrize("count", [2, 3, 5])
def test_model_stock_of_many_takes_the_mean_cosine_over_pairs(count: int) -> None:
    base = normal(0)
    models = [base + normal(9) + 0.7 * normal(seed + 20) for seed in range(count)]
    vectors = [(m.double() - base.double()) for m in models]
    cosines = [
        float(vectors[i] @ vectors[j] / (vectors[i].norm() * vectors[j].norm()))
        for i in range(count)
        for j in range(i)
    ]
    mean = sum(cosines) / len(cosines)
    share = count * mean / (1 + (count - 1) * mean)
    pieces = [slice(0, 70), slice(70, 200)]  # products of parts add up
    total = sum(products(base[at], [m[at] for m in models]) for at in pieces)
    assert stock_share(total) == pytest.approx(share)
    expected = (1 - share) * base.double() + share * torch.stack([m.double() for m in models]).mean(0)
    torch.testing.assert_close(model_stock(base, models, share), expected)


def test_the_ends_of_model_stock() -> None:
    base, model = normal(0), normal(1)
    assert stock_share(products(base, [model, model])) == pytest.approx(1)
    assert stock_share(products(base, [model, 2 * base - model])) == 0  # opposite ways: the base stays
    assert stock_share(products(base, [model, base])) == 0
    assert stock_share(products(base, [base, base])) == 0
    assert stock_share(products(base, [model])) == 1


@pytest.mark.parametrize("density", [0.05, 0.15, 0.6])
@pytest.mark.parametrize("outliers", [0.0, 0.006, 0.1, 0.4])
def test_breadcrumbs_mask_both_tails(density: float, outliers: float) -> None:
    base, models, scales = normal(0), [normal(1), normal(2)], [0.3, -0.2]
    expected = base.double().tolist()
    bands = []
    for model, scale in zip(models, scales, strict=True):
        vector = (model.double() - base.double()).tolist()
        order = sorted(range(len(vector)), key=lambda i, vector=vector: -abs(vector[i]))
        first = int(outliers * len(vector))
        for i in order[first : first + int(density * len(vector))]:
            expected[i] += scale * vector[i]
        pieces = magnitudes(base, model).split(33)
        bands.append(band(lambda pieces=pieces: pieces, len(base), density, outliers))
    found = breadcrumbs(base, models, bands, scales)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_bands_of_small_tensors_keep_something() -> None:
    one = torch.tensor([0.5])
    assert band(lambda: [one], 1, 0.15, 0.006) == (0.0, float("inf"))
    assert band(lambda: [torch.tensor([3.0, 1.0, 2.0])], 3, 0.34, 0.34) == (2.0, 3.0)


def test_dare_rescales_what_it_keeps() -> None:
    base, models, scales = normal(0), [normal(1), normal(2)], [0.4, 0.7]
    kept = [normal(3) > 1, normal(4) > 1]
    expected = base.double()
    for model, mine, scale in zip(models, kept, scales, strict=True):
        vector = (model.double() - base.double()).tolist()
        change = [scale * v / 0.2 if k else 0.0 for v, k in zip(vector, mine.tolist(), strict=True)]
        expected = expected + torch.tensor(change, dtype=torch.float64)
    torch.testing.assert_close(dare(base, models, kept, 0.2, scales), expected)
    everything = [torch.ones(200, dtype=torch.bool)] * 2
    torch.testing.assert_close(
        dare(base, models, everything, 1.0, scales), task_arithmetic(base, models, scales)
    )
