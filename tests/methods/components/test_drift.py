"""The drift of old classes: laws of the linear map, and what moves by it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.experiment.config import check
from cofima.methods.components.discriminant import SharedGaussians
from cofima.methods.components.drift import ALPHAS, choose_alpha, drift_map, left_out_residuals
from cofima.methods.components.gaussians import ClassGaussians, gaussian


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(width: int) -> Tensor:
    return torch.linalg.qr(noise(width, width, seed=9)).Q


@pytest.mark.parametrize("count", [3, 20])
def test_features_that_do_not_move_give_the_identity(count: int) -> None:
    before = noise(count, 6)
    assert torch.equal(drift_map(before, before, 1.0), torch.eye(6, dtype=torch.float64))
    still = torch.zeros(3, 6)
    assert torch.equal(drift_map(still, still, 1.0), torch.eye(6, dtype=torch.float64))


def test_a_rotation_is_recovered_as_the_ridge_vanishes() -> None:
    before, turn = noise(20, 6), rotation(6)
    errors = [float((drift_map(before, before @ turn, a) - turn).norm()) for a in (1.0, 1e-3, 1e-9)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_along_each_direction_its_part_is_recovered() -> None:
    before, turn, alpha = noise(20, 6), rotation(6), 0.7
    values, vectors = torch.linalg.eigh(before.T @ before)
    rho = alpha * values.sum() / 6
    part = (values / (values + rho))[:, None] * (vectors.T @ (turn - torch.eye(6)))
    found = vectors.T @ (drift_map(before, before @ turn, alpha) - torch.eye(6))
    torch.testing.assert_close(found, part)


@pytest.mark.parametrize("count", [1, 4, 30])
@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_few_images_cannot_throw_the_means_away(count: int, alpha: float) -> None:
    before, after = noise(count, 6), 100 * noise(count, 6, seed=1)
    moved = drift_map(before, after, alpha) - torch.eye(6)
    rho = alpha * before.square().sum() / 6
    bound = torch.linalg.matrix_norm(after - before, 2) / (2 * rho.sqrt())
    assert float(torch.linalg.matrix_norm(moved, 2)) <= float(bound) * (1 + 1e-9)


def test_few_and_many_images_have_one_formula() -> None:
    before, after = noise(5, 8), noise(5, 8, seed=1)
    rho = before.square().sum() / 8
    inverse = torch.linalg.inv(before.T @ before + rho * torch.eye(8))
    slow = torch.eye(8) + inverse @ before.T @ (after - before)
    torch.testing.assert_close(drift_map(before, after, 1.0), slow)
    padded = [torch.cat([part, torch.zeros(5, 8)]) for part in (before, after)]  # 0 stays 0
    torch.testing.assert_close(drift_map(*padded, 1.0), slow)


@pytest.mark.parametrize("count", [6, 24])
def test_classes_left_out_are_those_of_solving_without_each(count: int) -> None:
    before, labels = noise(count, 8), torch.arange(count) % 3
    after = before @ rotation(8) + 0.1 * noise(count, 8, seed=1)
    slow = []
    for alpha in ALPHAS:
        rho, error = alpha * before.square().sum() / 8, 0.0
        for label in range(3):
            rest = labels != label
            gram = before[rest].T @ before[rest] + rho * torch.eye(8)
            moved = torch.linalg.solve(gram, before[rest].T @ (after - before)[rest])
            error += float((after - before - before @ moved)[~rest].square().sum())
        slow.append(error)
    found = torch.stack([r.square().sum() for r in left_out_residuals(before, after, labels, ALPHAS)])
    torch.testing.assert_close(found, torch.tensor(slow, dtype=torch.float64))
    assert choose_alpha(before, after, labels) == ALPHAS[min(range(5), key=slow.__getitem__)]
    assert choose_alpha(before, after, torch.zeros(count)) == 1.0


@pytest.mark.parametrize("count", [1, 4, 30])
def test_a_gaussian_moves_as_its_features_do(count: int) -> None:
    features, turn = noise(count, 12), 2 * rotation(12)
    one, two = gaussian(features, shrink=False).moved(turn), gaussian(features @ turn, shrink=False)
    assert one.whole == (count == 30)
    torch.testing.assert_close(one.mean, two.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.covariance, two.covariance, rtol=1e-4, atol=4e-4)  # the ridge moves, too


def test_a_whole_covariance_moves_exactly_by_any_map() -> None:
    features, any_map = noise(30, 6), noise(6, 6, seed=3)
    one = gaussian(features).moved(any_map)
    expected = any_map.T @ gaussian(features).covariance.double() @ any_map
    torch.testing.assert_close(one.covariance.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(one.factor, one.factor.tril())
    assert bool((one.factor.diagonal() > 0).all())


def test_a_shared_scatter_moves_exactly() -> None:
    features, any_map = noise(30, 6), noise(6, 6, seed=3)
    one, two = SharedGaussians(6), SharedGaussians(6)
    one.add(features)
    two.add(features @ any_map)
    one.move(any_map)
    torch.testing.assert_close(one.within, two.within)
    torch.testing.assert_close(one.centers[0], two.centers[0])


FAMILY = ("slca", "coma", "cofima", "wise_ft", "ema", "weight_ensemble")


@pytest.mark.parametrize("name", FAMILY)
def test_old_classes_follow_the_features_of_the_task(name: str, tiny: Any, monkeypatch: Any) -> None:
    """The map is that of the task's images before any weight changes and after all have."""
    stream = tiny.stream((2, 2), per_class=6)
    method = tiny.model(tiny.config(name, train={"epochs": 1}, options={"drift": "linear"}), stream).method
    method.learn(stream[0])
    old = ClassGaussians.restore({key: value.clone() for key, value in method.gaussians.state().items()})
    before = method.features(stream[1].train)
    method.learn(stream[1])
    after = method.features(stream[1].train)
    assert not torch.equal(before, after)
    alpha = choose_alpha(before, after, stream[1].train.labels)
    old.move(drift_map(before, after, alpha))
    for label in range(2):
        assert torch.equal(method.gaussians.means[label], old.means[label])
        assert torch.equal(method.gaussians.covariance(label), old.covariance(label))
    assert f"drift of old classes: alpha {alpha:g}" in method.facts["notes"]
    assert method.mean_scale(4) is None


def test_nothing_is_moved_where_the_backbone_stays(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tiny.stream((2, 2), per_class=6)
    how = {"lam": 0.0, "drift": "linear"}
    method = tiny.model(tiny.config("coma", train={"epochs": 1}, options=how), stream).method
    monkeypatch.setattr(ClassGaussians, "move", lambda *_: pytest.fail("it was moved"))
    for task in stream:
        method.learn(task)
    assert not [note for note in method.facts["notes"] if "drift" in note]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classifier": "ridge"}, "hidden features behind a random projection do not move by a linear map"),
        ({"statistics": "trained"}, "old classes follow the merged weights"),
    ],
)
@pytest.mark.parametrize("method", ["coma", "cofima"])
def test_what_drift_cannot_follow_is_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CofimaError, match=message):
        check({"method": method, "options": {"drift": "linear"} | options})
