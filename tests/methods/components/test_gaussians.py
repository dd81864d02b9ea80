"""Class Gaussians: what is drawn has the mean and covariance of what was seen, also of very little."""

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf, ledoit_wolf_shrinkage
from torch import Tensor

from cofima.methods.components import gaussians as module
from cofima.methods.components.gaussians import (
    RIDGE,
    ClassGaussians,
    Sampler,
    by_class,
    contrasts,
    gaussian,
    ledoit_wolf,
    mean_scale,
    pooled,
)

CPU = torch.device("cpu")


def features(count: int, width: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=g)
    return torch.randn(count, width, generator=g) @ mix + 3 * torch.randn(width, generator=g)


def remembered(*sets: Tensor) -> ClassGaussians:
    gaussians = ClassGaussians()
    for one in sets:
        gaussians.add(one)
    return gaussians


def test_the_mean_and_the_unbiased_covariance_are_kept() -> None:
    seen = features(40, 6)
    gaussians = remembered(seen)
    covariance = np.cov(seen.double().numpy(), rowvar=False, ddof=1) + RIDGE * np.eye(6)
    np.testing.assert_allclose(gaussians.means[0], seen.double().mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gaussians.covariance(0), covariance, rtol=1e-5, atol=1e-5)
    assert gaussians.counts == [40]
    assert gaussians.shrunk == [False]


def test_a_large_mean_does_not_swamp_a_small_spread() -> None:
    """Covariances in float32 of features around 1000 would be noise."""
    seen = features(60, 4).double() * 1e-2 + 1e3
    expected = np.cov(seen.float().double().numpy(), rowvar=False) + RIDGE * np.eye(4)
    np.testing.assert_allclose(remembered(seen.float()).covariance(0), expected, rtol=1e-4, atol=1e-7)


def test_drawn_features_recover_mean_and_covariance() -> None:
    sets = [features(50, 5, seed) for seed in (1, 2, 3)]
    gaussians = remembered(*sets)
    sampler = Sampler(gaussians, CPU, mean_scale(torch.tensor([0, 0, 1])))
    drawn, labels = sampler.draw([100_000, 7, 100_000], torch.Generator().manual_seed(0))
    assert labels.bincount().tolist() == [100_000, 7, 100_000]
    for label, scale in ((0, 0.95), (2, 1.0)):
        mine = drawn[labels == label].double()
        spread = gaussians.covariance(label).diagonal().sqrt()
        error = (mine.mean(0) - scale * gaussians.means[label]).abs() / spread
        assert float(error.max()) < 5 / 100_000**0.5
        covariance = torch.cov(mine.T)
        outer = spread[:, None] * spread
        assert float(((covariance - gaussians.covariance(label)).abs() / outer).max()) < 0.02


def test_drawing_equals_the_slow_distribution_given_the_same_noise() -> None:
    gaussians = remembered(features(50, 5, 1), features(50, 5, 2))
    sampler = Sampler(gaussians, CPU, mean_scale(torch.tensor([0, 1])))
    drawn, labels = sampler.draw([3, 4], torch.Generator().manual_seed(9))
    chance = torch.Generator().manual_seed(9)
    noise = torch.cat([torch.randn(count, 5, generator=chance) for count in (3, 4)])
    for row, (label, e) in enumerate(zip(labels.tolist(), noise, strict=True)):
        mean = gaussians.means[label] * (0.95 if label == 0 else 1.0)
        slow = torch.distributions.MultivariateNormal(mean, scale_tril=gaussians.classes[label].factor)
        torch.testing.assert_close(drawn[row], slow.loc + slow.scale_tril @ e, rtol=1e-5, atol=1e-5)


def test_drawing_is_reproducible_and_classes_without_draws_are_skipped() -> None:
    sampler = Sampler(remembered(features(20, 3, 1), features(20, 3, 2)), CPU)
    a, b = (sampler.draw([0, 4], torch.Generator().manual_seed(5))[0] for _ in range(2))
    assert torch.equal(a, b)
    other, labels = sampler.draw([0, 4], torch.Generator().manual_seed(6))
    assert not torch.equal(a, other)
    assert labels.tolist() == [1, 1, 1, 1]
    nothing, labels = sampler.draw([0, 0], torch.Generator())
    assert nothing.shape == (0, 3)
    assert len(labels) == 0


# --- the scale of old means ------------------------------------------------------------------------


def test_scales_for_unequal_tasks() -> None:
    """The ten tasks of Cars-196: nine of 20 classes, one of 16."""
    task = torch.repeat_interleave(torch.tensor([20] * 9 + [16]))
    scale = mean_scale(task)
    expected = [0.9 + 0.1 * (t + 1) / 10 for t in range(9) for _ in range(20)] + [1.0] * 16
    torch.testing.assert_close(scale, torch.tensor(expected))
    assert float(scale.max()) == 1.0
    assert float(scale.min()) > 0.9


@pytest.mark.parametrize("sizes", [[1], [3, 1, 2], [1] * 7, [2, 2]])
def test_the_newest_task_has_scale_one_and_older_ones_less(sizes: list[int]) -> None:
    scale = mean_scale(torch.repeat_interleave(torch.tensor(sizes)))
    assert torch.equal(scale[-sizes[-1] :], torch.ones(sizes[-1]))
    assert float(scale[0]) == pytest.approx(0.9 + 0.1 / len(sizes))
    assert bool((scale.diff() >= 0).all())


# --- few images ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 7])
def test_few_images_are_taken_as_they_are_where_the_user_says_so(count: int) -> None:
    seen = features(count, 32)
    gaussians = ClassGaussians(shrink=False)
    gaussians.add(seen)
    covariance = np.cov(seen.double().numpy(), rowvar=False, ddof=1) + RIDGE * np.eye(32)
    np.testing.assert_allclose(gaussians.covariance(0), covariance, rtol=1e-5, atol=1e-4)
    assert gaussians.shrunk == [False]
    gaussians.add(features(1, 32))
    assert gaussians.shrunk == [False, True]  # one image has no covariance


@pytest.mark.parametrize(("count", "shrunk"), [(1, True), (2, True), (7, True), (8, False), (31, False)])
def test_few_images_are_shrunk_and_recorded(count: int, shrunk: bool) -> None:
    gaussians = remembered(features(200, 32, 1), features(count, 32, 2))
    assert gaussians.shrunk == [False, shrunk]
    assert (count < 16) == (not gaussians.classes[1].whole)
    assert torch.isfinite(gaussians.covariance(1)).all()
    assert float(torch.linalg.eigvalsh(gaussians.covariance(1).double()).min()) > 0
    if shrunk and count > 1:  # between the empirical covariance and its mean variance on the diagonal
        empirical = np.cov(features(count, 32, 2).double().numpy(), rowvar=False, ddof=0)
        off = ~np.eye(32, dtype=bool)
        assert np.abs(gaussians.covariance(1).numpy()[off]).sum() < np.abs(empirical[off]).sum()
        assert gaussians.covariance(1).trace() == pytest.approx(np.trace(empirical) + 32 * RIDGE, rel=1e-3)


def test_one_image_borrows_the_spread_of_the_other_classes() -> None:
    gaussians = remembered(features(200, 6, 1), features(200, 6, 2), features(1, 6, 3))
    mean = (gaussians.covariance(0).trace() + gaussians.covariance(1).trace()) / 12
    torch.testing.assert_close(gaussians.covariance(2), (mean + RIDGE) * torch.eye(6), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gaussians.means[2], features(1, 6, 3)[0])


def test_one_image_of_the_first_class_ever() -> None:
    gaussians = remembered(features(1, 6))
    torch.testing.assert_close(gaussians.covariance(0), RIDGE * torch.eye(6))
    assert gaussians.shrunk == [True]


def test_images_that_are_all_the_same() -> None:
    same = torch.full((20, 6), 2.5)
    gaussians = remembered(same)
    torch.testing.assert_close(gaussians.covariance(0), RIDGE * torch.eye(6))
    drawn, _ = Sampler(gaussians, CPU).draw([50], torch.Generator().manual_seed(0))
    assert float((drawn - 2.5).abs().max()) < 0.1


def test_a_failed_factor_is_shrunk_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = module._cholesky, []

    def fails_first(covariance: Tensor) -> Tensor | None:
        calls.append(1)
        return None if len(calls) == 1 else real(covariance)

    monkeypatch.setattr(module, "_cholesky", fails_first)
    gaussians = remembered(features(50, 6))
    assert gaussians.shrunk == [True]
    assert torch.isfinite(gaussians.classes[0].factor).all()
    monkeypatch.setattr(module, "_cholesky", lambda covariance: None)
    gaussians.add(features(50, 6))
    factor = gaussians.classes[1].factor
    assert torch.equal(factor, torch.diag(factor.diagonal()))
    assert bool((factor.diagonal() > 0).all())


def test_a_matrix_that_is_not_positive_definite_has_no_factor() -> None:
    assert module._cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]])) is None
    assert module._cholesky(torch.full((2, 2), float("nan"))) is None
    factor = module._cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    torch.testing.assert_close(factor, torch.tensor([[2.0, 0.0], [1.0, 2.0]]))


# --- few rows and one number ------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "width"), [(2, 9), (7, 40), (30, 33), (60, 12), (5, 1)])
def test_the_weight_of_the_identity_is_scikit_learn_s(count: int, width: int) -> None:
    seen = features(count, width).double()
    known = ledoit_wolf_shrinkage(seen.numpy())
    assert ledoit_wolf(seen - seen.mean(0)) == pytest.approx(known, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("count", [2, 5, 7, 8, 15])
def test_few_rows_are_the_covariance_exactly(count: int) -> None:
    """Shrunk below 8 images of width 32, as they are from there on, whole from 16 on."""
    seen = features(count, 32).double()
    one = gaussian(seen)
    as_it_is, shrunk = np.cov(seen.numpy(), rowvar=False), LedoitWolf().fit(seen.numpy()).covariance_
    expected = shrunk if count < 8 else as_it_is
    assert one.rows.shape == (count - 1, 32)
    np.testing.assert_allclose(one.covariance, expected + RIDGE * np.eye(32), rtol=1e-5, atol=1e-4)
    assert gaussian(features(16, 32)).whole


def test_contrasts_have_the_scatter_of_the_images() -> None:
    seen = features(9, 5).double()
    rows = contrasts(seen)
    torch.testing.assert_close(rows.T @ rows, (seen - seen.mean(0)).T @ (seen - seen.mean(0)))
    assert contrasts(seen[:1]).shape == (0, 5)


def test_features_drawn_from_few_rows_have_their_law() -> None:
    one = gaussian(features(4, 12), shrink=True)
    assert (one.shrunk, one.whole) == (False, False)
    drawn, _ = Sampler(ClassGaussians([one]), CPU).draw([200_000], torch.Generator().manual_seed(0))
    spread = one.covariance.diagonal().sqrt()
    assert float(((drawn.mean(0) - one.mean).abs() / spread).max()) < 5 / 200_000**0.5
    error = (torch.cov(drawn.double().T) - one.covariance).abs() / (spread[:, None] * spread)
    assert float(error.max()) < 0.02


@pytest.mark.parametrize("count", [1, 5, 8, 15, 20])
def test_distances_are_those_of_a_dense_solve(count: int) -> None:
    """Also where the spread is the ridge alone, which Woodbury's formula gets wrong in single precision."""
    seen = features(count, 32)
    gaussians = remembered(seen)
    asked = torch.cat([features(4, 32, seed=1), seen[:1], seen.mean(0, keepdim=True)])
    away = asked.double() - gaussians.means[0].double()
    rows, spread = (part.double() if isinstance(part, Tensor) else part for part in gaussians.span(0))
    covariance = rows.T @ rows + spread * torch.eye(32, dtype=torch.float64)
    slow = (away * torch.linalg.solve(covariance, away.T).T).sum(1).sqrt()
    torch.testing.assert_close(gaussians.nearest(asked).double(), slow, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("counts", [(3, 4), (1, 5), (5, 1), (1, 1), (9, 6), (3, 20), (20, 3), (20, 20)])
def test_pooled_is_the_covariance_of_all_images(counts: tuple[int, int]) -> None:
    """Few rows stay few rows until together they are half of the width."""
    one, two = (features(count, 24, seed) for seed, count in enumerate(counts))
    both = pooled(gaussian(one, shrink=False), gaussian(two, shrink=False))
    assert both.whole == (sum(counts) - 1 >= 12 or max(counts) >= 12)
    every = torch.cat([one, two]).double()
    expected = np.cov(every.numpy(), rowvar=False) + RIDGE * np.eye(24)
    np.testing.assert_allclose(both.covariance, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(both.mean.double(), every.mean(0), rtol=1e-5, atol=1e-5)
    assert both.count == sum(counts)


def test_pooling_weighs_what_was_shrunk_by_its_images() -> None:
    one, two = gaussian(features(3, 24)), gaussian(features(4, 24, seed=1))
    assert (one.shrunk, two.shrunk) == (True, True)
    both = pooled(one, two)
    ridge, gap = RIDGE * torch.eye(24), one.mean - two.mean
    dense = 2 * (one.covariance - ridge) + 3 * (two.covariance - ridge) + 12 / 7 * torch.outer(gap, gap)
    torch.testing.assert_close(both.covariance, dense / 6 + ridge, rtol=1e-4, atol=1e-4)
    assert both.shrunk


def test_the_order_of_pooling_does_not_matter() -> None:
    parts = [gaussian(features(count, 24, seed), shrink=False) for seed, count in enumerate((3, 2, 4))]
    one = pooled(pooled(parts[0], parts[1]), parts[2])
    two = pooled(parts[2], pooled(parts[1], parts[0]))
    torch.testing.assert_close(one.covariance, two.covariance, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.mean, two.mean)


def test_single_images_borrow_the_same_however_the_classes_were_restored() -> None:
    gaussians = remembered(features(9, 24, 1), features(30, 24, 2))
    gaussians.pool(0, features(3, 24, 3))
    again = ClassGaussians.restore(gaussians.state())
    for one in (gaussians, again):
        one.add(features(1, 24, 4))
        one.add(features(1, 24, 5))
    assert gaussians.state()["spreads"].tolist() == again.state()["spreads"].tolist()
    assert gaussians.state()["spreads"][2] == pytest.approx(
        sum(float(gaussians.covariance(label).trace()) / 48 for label in range(2)) + RIDGE, rel=1e-5
    )


def test_features_are_sorted_by_class_in_their_order() -> None:
    labels = torch.tensor([3, 1, 3, 2, 1])
    found = by_class(torch.arange(5.0)[:, None], labels)
    assert {label: rows[:, 0].tolist() for label, rows in found.items()} == {1: [1, 4], 2: [3], 3: [0, 2]}


# --- the state -------------------------------------------------------------------------------------


def test_the_state_is_packed_and_comes_back_bit_for_bit() -> None:
    gaussians = remembered(features(40, 6, 1), features(1, 6, 2), features(2, 6, 3), features(30, 6, 3))
    state = gaussians.state()
    assert state["ranks"].tolist() == [4, 0, 1, 4]  # 21 numbers of a triangle are four rows of six
    assert state["rows"].shape == (9, 6)
    again = ClassGaussians.restore({k: v.clone() for k, v in state.items()})
    assert len(again) == 4
    assert (again.counts, again.shrunk) == (gaussians.counts, gaussians.shrunk)
    for label in range(4):
        assert torch.equal(again.covariance(label), gaussians.covariance(label))
        assert torch.equal(again.means[label], gaussians.means[label])
    again.add(features(9, 6))
    assert len(again) == 5
    assert len(gaussians) == 4


def test_nothing_remembered_comes_back_as_nothing() -> None:
    assert len(ClassGaussians.restore(ClassGaussians().state())) == 0
