"""The ridge regression behind a random projection: sums, solutions, and the choice of the ridge."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from cofima.methods.components.projection import (
    RIDGES,
    ProjectedHead,
    RidgeSums,
    best_ridge,
    held_out_errors,
    hidden_pairs,
    least,
)

WIDTH = 40


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(count: int, classes: int, seed: int = 0, features: int = 6, noise: float = 1.0):
    """Return features of noisy classes, their labels, and a head."""
    chance = drawn(seed)
    labels = torch.randint(classes, (count,), generator=chance)
    centers = torch.randn(classes, features, generator=chance)
    values = centers[labels] + noise * torch.randn(count, features, generator=chance)
    return values, labels, ProjectedHead(features, WIDTH, drawn(5))


def batch_solution(hidden: Tensor, labels: Tensor, ridge: float, classes: int) -> Tensor:
    """Solve the regression from all images at once, by the normal equations."""
    targets = one_hot(labels, classes).double()
    return torch.linalg.solve(
        hidden.T @ hidden + ridge * torch.eye(hidden.shape[1], dtype=torch.float64), hidden.T @ targets
    ).T


@pytest.mark.parametrize("ridge", [1e-2, 1.0, 1e4])
def test_task_after_task_gives_the_solution_of_all_images_at_once(ridge: float) -> None:
    features, labels, head = some(90, 7)
    labels = labels.sort().values  # classes arrive in order
    hidden = head.hidden(features.double())
    sums = RidgeSums.empty(WIDTH)
    for known in (3, 4, 7):
        mine = labels < known if known == 3 else (labels >= {4: 3, 7: 4}[known]) & (labels < known)
        sums.add(hidden_pairs(head, features[mine], labels[mine]), known)
        seen = labels < known
        weight, used = sums.solve(ridge)
        assert used == ridge
        assert weight.shape == (known, WIDTH)
        expected = batch_solution(hidden[seen], labels[seen], ridge, known)
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)


def test_columns_that_grow_are_columns_that_were_there_all_along() -> None:
    features, labels, head = some(60, 5)
    labels = labels.sort().values
    first = labels < 2
    lazy, early = RidgeSums.empty(WIDTH), RidgeSums.empty(WIDTH)
    for mine, known in ((first, 2), (~first, 5)):
        lazy.add(hidden_pairs(head, features[mine], labels[mine]), known)
        early.add(hidden_pairs(head, features[mine], labels[mine]), 5)
        if known == 2:
            torch.testing.assert_close(early.solve(1.0)[0][:2], lazy.solve(1.0)[0], rtol=1e-10, atol=1e-12)
            assert not early.solve(1.0)[0][2:].any()
    assert torch.equal(lazy.packed, early.packed)
    assert torch.equal(lazy.cross, early.cross)


def test_rows_are_summed_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from cofima.methods.components import projection

    features, labels, head = some(50, 3)
    whole, parts = RidgeSums.empty(WIDTH), RidgeSums.empty(WIDTH)
    whole.add(hidden_pairs(head, features, labels), 3)
    errors = held_out_errors(head, features, labels, 40)
    monkeypatch.setattr(projection, "AT_ONCE", 7)
    parts.add(hidden_pairs(head, features, labels), 3)
    torch.testing.assert_close(parts.packed, whole.packed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.cross, whole.cross, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(held_out_errors(head, features, labels, 40), errors, rtol=1e-6, atol=1e-12)


def test_the_packed_triangle_is_the_symmetric_sum() -> None:
    features, labels, head = some(30, 3)
    sums = RidgeSums.empty(WIDTH)
    sums.add(hidden_pairs(head, features, labels), 3)
    hidden = head.hidden(features.double())
    assert sums.packed.shape == (WIDTH * (WIDTH + 1) // 2,)
    assert sums.packed.dtype == torch.float64
    torch.testing.assert_close(sums.gram(), torch.tril(hidden.T @ hidden), rtol=1e-12, atol=1e-12)


def test_a_sum_that_cannot_be_factored_gets_a_larger_ridge() -> None:
    features, labels, head = some(5, 2)  # five images: the sum of 40 x 40 has rank 5
    sums = RidgeSums.empty(WIDTH)
    sums.add(hidden_pairs(head, 1e6 * features, labels), 2)
    weight, used = sums.solve(1e-8)
    assert used > 1e-8
    assert torch.isfinite(weight).all()
    predicted = head.hidden(1e6 * features.double()) @ weight.T
    assert torch.equal(predicted.argmax(1), labels)


def slow_errors(head: ProjectedHead, features: Tensor, labels: Tensor, train: int) -> Tensor:
    """Solve the regression seventeen times, as the definition says."""
    hidden = head.hidden(features.double())
    targets = one_hot(labels - labels.min()).double()
    errors = []
    for ridge in RIDGES:
        sums = hidden[:train].T @ hidden[:train] + ridge * torch.eye(WIDTH, dtype=torch.float64)
        weight = torch.linalg.solve(sums, hidden[:train].T @ targets[:train])
        errors.append((hidden[train:] @ weight - targets[train:]).square().mean())
    return torch.stack(errors)


@pytest.mark.parametrize("dual", [True, False, None])
@pytest.mark.parametrize("count", [45, 60, 300])  # fewer and more images than hidden features
def test_errors_are_those_of_seventeen_solutions(count: int, dual: bool | None) -> None:
    features, labels, head = some(count, 4, seed=count)
    train = int(0.8 * count)
    errors, slow = (
        held_out_errors(head, features, labels + 3, train, dual),
        slow_errors(head, features, labels, train),
    )
    sure = slice(4, None)  # below 1e-4 the slow solution itself has few digits
    torch.testing.assert_close(errors[sure], slow[sure], rtol=1e-5, atol=1e-12)
    assert torch.isfinite(errors).all()
    assert least(errors) == least(slow)


@pytest.mark.parametrize("count", [45, 300])
def test_primal_and_dual_agree(count: int) -> None:
    features, labels, head = some(count, 4, seed=3)
    train = int(0.8 * count)
    pair = [held_out_errors(head, features, labels, train, dual) for dual in (True, False)]
    torch.testing.assert_close(pair[0][4:], pair[1][4:], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("noise", "least_ridge"), [(0.1, 0.0), (3.0, 100.0)])
def test_noisy_classes_get_a_larger_ridge(noise: float, least_ridge: float) -> None:
    features, labels, head = some(100, 4, noise=noise)
    assert best_ridge(head, features, labels, drawn(0)) > least_ridge
    if noise < 1:
        assert best_ridge(head, features, labels, drawn(0)) < 100


def test_the_choice_is_made_on_shuffled_images() -> None:
    """Sorted by class, the last fifth would hold classes that the others do not know."""
    features, labels, head = some(100, 5, noise=0.2)
    order = labels.argsort()
    features, labels = features[order], labels[order]
    shuffled = torch.randperm(100, generator=drawn(8))
    expected = least(held_out_errors(head, features[shuffled], labels[shuffled], 80))
    assert best_ridge(head, features, labels, drawn(8)) == expected
    assert expected != least(held_out_errors(head, features, labels, 80))


def test_ties_go_to_the_larger_ridge() -> None:
    errors = torch.full((17,), 2.0, dtype=torch.float64)
    assert least(errors) == 1e8
    errors[3:6] = 1.0
    assert least(errors) == RIDGES[5]
    errors[2] = 1.0 - 1e-13  # rounding
    assert least(errors) == RIDGES[5]
    errors[2] = 0.999
    assert least(errors) == RIDGES[2]
    assert [f"{ridge:.0e}" for ridge in RIDGES] == [f"1e{power:+03d}" for power in range(-8, 9)]


def test_two_images_are_enough_to_choose() -> None:
    features, labels, head = some(2, 1)
    assert best_ridge(head, features, labels, drawn(0)) in RIDGES


def test_the_head_is_a_product_and_keeps_no_projection() -> None:
    features, _, head = some(9, 2)
    head.grow(3, drawn(1))
    head.grow(1, drawn(2))
    flat = head.flat()
    expected = (features @ head.matrix).clamp(min=0) @ flat["weight"].T
    torch.testing.assert_close(head(features), expected)
    assert not any("matrix" in key for key in head.state_dict())
    assert torch.equal(ProjectedHead(6, WIDTH, drawn(5)).matrix, head.matrix)
    assert not torch.equal(ProjectedHead(6, WIDTH, drawn(6)).sample(), head.sample())
