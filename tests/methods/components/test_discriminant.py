"""Linear discriminant analysis: against scikit-learn, and against leaving images out one by one."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.covariance import oas as scikit_oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor
from torch.nn.functional import one_hot

from cofima.methods.components.closed_form import ClosedFormOptions, discriminant_head, shrink
from cofima.methods.components.discriminant import (
    SHARES,
    SharedGaussians,
    choose_shrinkage,
    discriminant,
    leave_one_out_losses,
    left_out_logits,
    oas,
    pool_means,
)
from cofima.methods.components.gaussians import RIDGE, Sampler
from cofima.models.head import power_normalized

WIDTH = 6


def images(counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return features of classes of these sizes, whose clouds overlap, in mixed order."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=g)]
    means, mix = torch.randn(len(counts), WIDTH, generator=g), torch.randn(WIDTH, WIDTH, generator=g)
    return torch.randn(len(labels), WIDTH, generator=g) @ mix + means[labels], labels


def remembered(features: Tensor, labels: Tensor, shrinkage: float = 0.2) -> SharedGaussians:
    found = SharedGaussians(features.shape[1], shrinkage=shrinkage)
    for label in range(int(labels.max()) + 1):
        found.add(features[labels == label])
    return found


def pooled_covariance(features: Tensor, labels: Tensor) -> np.ndarray:
    x, y = features.double().numpy(), labels.numpy()
    parts = [
        np.cov(x[y == c], rowvar=False, ddof=0) * (y == c).sum() for c in np.unique(y) if (y == c).sum() > 1
    ]
    return np.sum(parts, axis=0) / (len(y) - len(np.unique(y)))


class Fixed(BaseEstimator):
    """A covariance that is known."""

    def __init__(self, covariance: Any = None) -> None:
        self.covariance = covariance

    def fit(self, X: Any) -> "Fixed":
        self.covariance_ = self.covariance
        return self


@pytest.mark.parametrize("priors", ["equal", "counts"])
def test_the_head_is_scikit_learn_s(priors: Any) -> None:
    features, labels = images([9, 4, 20])
    gaussians = remembered(features, labels)
    within = pooled_covariance(features, labels)
    shrunk = 0.8 * within + 0.2 * np.trace(within) / WIDTH * np.eye(WIDTH)
    shares = np.ones(3) / 3 if priors == "equal" else np.array([9, 4, 20]) / 33
    known = LinearDiscriminantAnalysis("lsqr", priors=shares, covariance_estimator=Fixed(shrunk))
    known.fit(features.double().numpy(), labels.numpy())
    weight, bias = discriminant(gaussians, priors)
    np.testing.assert_allclose(weight, known.coef_, rtol=1e-9, atol=1e-10)
    # but for a constant, which no decision and no softmax depends on
    found, expected = bias.numpy(), known.intercept_
    np.testing.assert_allclose(found - found[0], expected - expected[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("count", [3, 5, 40])
def test_the_computed_shrinkage_is_scikit_learn_s(count: int) -> None:
    features, labels = images([count])
    gaussians = remembered(features, labels)
    _, known = scikit_oas(features.double().numpy())
    assert oas(gaussians.within, gaussians.degrees + 1) == pytest.approx(known, rel=1e-9)
    assert oas(torch.eye(4), 10) == 1.0  # nothing to be told apart


def test_the_covariance_is_that_within_classes() -> None:
    features, labels = images([9, 1, 20])
    gaussians = remembered(features, labels)
    assert gaussians.degrees == 27
    np.testing.assert_allclose(gaussians.within, pooled_covariance(features, labels), rtol=1e-10)
    assert (gaussians.counts, len(gaussians)) == ([9, 1, 20], 3)


def test_more_images_of_a_class_are_as_if_they_had_been_there() -> None:
    features, labels = images([12, 7])
    late = (labels == 1) & (torch.arange(19) > 8)
    gaussians, whole = remembered(features[~late], labels[~late]), remembered(features, labels)
    gaussians.pool(1, features[late])
    assert (gaussians.degrees, gaussians.counts) == (whole.degrees, whole.counts)
    torch.testing.assert_close(gaussians.within, whole.within)
    torch.testing.assert_close(gaussians.centers[1], whole.centers[1])


def slow_losses(features: Tensor, labels: Tensor, mine: Tensor, priors: Any) -> list[float]:
    """Leave out each image in turn, ask all others, and sum the loss at the best of many temperatures."""
    found = []
    for share in SHARES:
        answers = []
        for image in mine.tolist():
            rest = torch.arange(len(labels)) != image
            weight, bias = discriminant(remembered(features[rest], labels[rest], share), priors)
            answers.append(weight @ features[image].double() + bias)
        colds = torch.linspace(-6, 3, 2000, dtype=torch.float64).exp()
        chances = torch.log_softmax(colds[:, None, None] * torch.stack(answers), 2)
        wanted = 0.99 * one_hot(labels[mine], chances.shape[2]) + 0.01 / chances.shape[2]
        found.append(float(-(chances * wanted).sum((1, 2)).max()))
    return found


@pytest.mark.parametrize("priors", ["equal", "counts"])
def test_losses_of_images_left_out_are_those_of_solving_without_each(priors: Any) -> None:
    features, labels = images([8, 3, 14, 5])
    mine = (labels >= 2).nonzero()[:, 0]  # those of the newest task
    found = leave_one_out_losses(remembered(features, labels), features[mine], labels[mine], priors)
    assert found is not None
    assert found.tolist() == pytest.approx(slow_losses(features, labels, mine, priors), rel=1e-3)


def test_the_share_of_the_least_loss_is_chosen_over_all_tasks() -> None:
    features, labels = images([8, 8, 9])
    early = labels < 2
    gaussians = remembered(features[early], labels[early])
    how = ClosedFormOptions(shrinkage="loo")
    shrink(gaussians, features[early], labels[early], how, "lda")
    first = gaussians.losses
    assert gaussians.shrinkage == SHARES[int(first.argmin())]
    gaussians.add(features[~early])
    said = shrink(gaussians, features[~early], labels[~early], how, "lda")
    second = leave_one_out_losses(gaussians, features[~early], labels[~early], "equal")
    torch.testing.assert_close(gaussians.losses, first + second)
    assert gaussians.shrinkage == SHARES[int(gaussians.losses.argmin())]
    assert said == f"shrinkage {gaussians.shrinkage:.3g}, left out"


def test_single_images_are_never_left_out() -> None:
    features, labels = images([1, 1, 5])
    gaussians = remembered(features, labels)
    only = labels < 2
    assert leave_one_out_losses(gaussians, features[only], labels[only], "equal") is None
    assert choose_shrinkage(gaussians, None) == oas(gaussians.within, 7)
    one = remembered(features[:1], torch.zeros(1, dtype=torch.int64))
    assert leave_one_out_losses(one, features[:1], torch.zeros(1, dtype=torch.int64), "equal") is None


def test_one_class_alone_chooses_nothing() -> None:
    features, labels = images([7])
    gaussians = remembered(features, labels)
    losses = leave_one_out_losses(gaussians, features, labels, "equal")
    assert choose_shrinkage(gaussians, losses) == oas(gaussians.within, 7)


def test_without_any_spread_classes_are_told_apart_by_their_means() -> None:
    means = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    gaussians = remembered(means, torch.arange(3))
    weight, bias = discriminant(gaussians, "equal")
    assert (means.double() @ weight.T + bias).argmax(1).tolist() == [0, 1, 2]
    torch.testing.assert_close(gaussians.covariance(0), RIDGE * torch.eye(2))


def test_distances_are_those_under_the_shared_covariance() -> None:
    features, labels = images([9, 6])
    gaussians, asked = remembered(features, labels), images([5], seed=7)[0]
    inverse = torch.linalg.inv(gaussians.covariance(0).double())
    away = asked.double()[:, None] - torch.stack(gaussians.centers)
    slow = torch.einsum("ncd,de,nce->nc", away, inverse, away).sqrt().amin(1)
    torch.testing.assert_close(gaussians.nearest(asked).double(), slow, rtol=1e-4, atol=1e-5)


def test_drawn_features_have_the_mean_of_the_class_and_the_covariance_of_all() -> None:
    gaussians = remembered(*images([9, 6]))
    drawn, labels = Sampler(gaussians, torch.device("cpu")).draw(
        [3, 100_000], torch.Generator().manual_seed(0)
    )
    mine = drawn[labels == 1].double()
    spread = gaussians.covariance(1).diagonal().sqrt()
    assert float(((mine.mean(0) - gaussians.means[1]).abs() / spread).max()) < 5 / 100_000**0.5
    assert (
        float(((torch.cov(mine.T) - gaussians.covariance(1)).abs() / torch.outer(spread, spread)).max())
        < 0.02
    )


def test_the_state_comes_back_bit_for_bit() -> None:
    gaussians = remembered(*images([9, 6]))
    again = SharedGaussians.restore({k: v.clone() for k, v in gaussians.state().items()}, WIDTH)
    for one in (gaussians, again):
        one.add(images([4], seed=5)[0])
        one.pool(0, images([3], seed=6)[0])
    assert gaussians.state().keys() == again.state().keys()
    for key, value in gaussians.state().items():
        assert torch.equal(value, again.state()[key]), key
    assert torch.equal(gaussians.factor(), again.factor())
    assert SharedGaussians(WIDTH).state() == {}
    assert len(SharedGaussians.restore({}, WIDTH)) == 0


def test_a_class_of_two_models_has_the_mean_of_all_its_images() -> None:
    rows = [{"means": torch.tensor([1.0, 2.0]), "counts": torch.tensor(3)}]
    rows += [{"means": torch.tensor([5.0, 2.0]), "counts": torch.tensor(1)}]
    made = pool_means(rows)
    assert made["means"].tolist() == [2.0, 2.0]
    assert made["counts"].tolist() == 4


def test_a_share_so_small_that_rounding_decides_is_made_larger() -> None:
    features, labels = images([3, 2])  # of rank 3
    gaussians = remembered(features, labels, shrinkage=1e-30)
    assert torch.isfinite(gaussians.factor()).all()


def test_a_left_out_image_is_as_far_as_if_it_had_never_been_there() -> None:
    chance = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 6, generator=chance), torch.arange(60) % 3
    features += 3 * torch.nn.functional.one_hot(labels, 6)
    whole = SharedGaussians(6, shrinkage=1e-6)  # so small that what the image adds to the trace is nothing
    for label in range(3):
        whole.add(features[labels == label])
    found = whole.nearest(features, labels)
    for place in (0, 31, 59):
        others = torch.arange(60) != place
        rest = SharedGaussians(6, shrinkage=1e-6)
        for label in range(3):
            rest.add(features[others & (labels == label)])
        scale = (whole.degrees / rest.degrees) ** 0.5  # the covariance is divided by what is left
        slow = float(rest.nearest(features[place][None])[0])
        assert float(found[place]) == pytest.approx(slow * scale, rel=0.03)
    assert (found >= whole.nearest(features) - 1e-4).all()


def test_halves_that_choose_otherwise_answer_on_the_scale_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They did not: one temperature was fitted to logits of two scales, and sure answers looked unsure."""
    features, labels = images([9, 8, 7])
    head = remembered(features, labels, 0.9)
    own = left_out_logits(head, features, labels, "equal", choose=False)
    choice = iter([0.01, 0.9])
    monkeypatch.setattr("cofima.methods.components.discriminant.choose_shrinkage", lambda *_: next(choice))
    found = left_out_logits(head, features, labels, "equal", choose=True)
    other = left_out_logits(remembered(features, labels, 0.01), features, labels, "equal", choose=False)
    assert found is not None
    assert own is not None
    assert other is not None
    first = torch.arange(len(labels)) % 2 == 0
    assert torch.equal(found[~first], own[~first])
    assert torch.equal(found[first].argmax(1), other[first].argmax(1))  # honest: by the choice of the others
    assert not torch.allclose(found[first], own[first])
    assert float(other[first].var(1).mean() / own[first].var(1).mean()) > 2
    torch.testing.assert_close(found[first].var(1).mean(), own[first].var(1).mean())


# --- power-normalized features ---------------------------------------------------------------------


def rooted(features: Tensor) -> Tensor:
    """Return signed square roots at unit length, by the definition."""
    roots = features.double().sign() * features.double().abs().sqrt()
    return roots / roots.norm(dim=1, keepdim=True)


def test_power_statistics_are_those_of_rooted_features_of_unit_length() -> None:
    features, labels = images([9, 7, 12])
    power = SharedGaussians(WIDTH, shrinkage=0.2, space="power")
    for label in range(3):
        power.add(features[labels == label][:5])
    for label in range(3):
        power.pool(label, features[labels == label][5:])
    plain = remembered(rooted(features), labels)
    near = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
    near(torch.stack(power.centers), torch.stack(plain.centers))
    near(power.within, plain.within)
    near(power.nearest(features, labels), plain.nearest(rooted(features), labels), atol=1e-2)
    left_out = left_out_logits(power, features, labels, "equal", choose=True)
    expected = left_out_logits(plain, rooted(features), labels, "equal", choose=True)
    assert left_out is not None
    assert expected is not None
    near(left_out, expected, atol=1e-2)
    head = discriminant_head(power, ClosedFormOptions(features="power"), [2, 1])
    weight, bias = discriminant(plain, "equal")
    near(head(features), (rooted(features) @ weight.T + bias).float(), atol=1e-2)
    again = SharedGaussians.restore(power.state(), WIDTH, "power")
    near(again.nearest(features), power.nearest(features))


def test_the_root_of_a_feature_that_is_0_has_a_gradient() -> None:
    features = torch.tensor([[0.0, 4.0, -9.0], [0.0, 0.0, 0.0]], requires_grad=True)
    found = power_normalized(features)
    torch.testing.assert_close(found[0].detach(), torch.tensor([0.0, 2.0, -3.0]) / 13**0.5)
    found.sum().backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
