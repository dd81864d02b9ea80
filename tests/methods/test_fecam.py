"""FeCAM: the definition, number by number; order of tasks, powers, few images, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cofima.classifier.edit import remove_class
from cofima.core.errors import CofimaError
from cofima.experiment.config import check
from cofima.methods.components.mahalanobis import Correlation
from cofima.store.model import load_model

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def correlation(z: np.ndarray, gamma_1: float, gamma_2: float) -> np.ndarray:
    """The paper's equations as printed, with full matrices."""
    cov = np.cov(z.T).reshape(z.shape[1], z.shape[1])
    width = len(cov)
    diagonal = np.mean(np.diag(cov))
    others = (cov.sum() - np.trace(cov)) / (width * (width - 1))
    eye = np.eye(width)
    shrunk = cov + gamma_1 * diagonal * eye + gamma_2 * others * (1 - eye)
    deviation = np.sqrt(np.diag(shrunk))
    return shrunk / np.outer(deviation, deviation)


def slow_distances(train, labels, test, power: float, gamma_1: float, gamma_2: float) -> np.ndarray:
    """Distances of test features to each class, feature by feature."""

    def transformed(x: np.ndarray) -> np.ndarray:
        x = x if power == 1 else np.maximum(x, 0) ** power
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    train, test = transformed(train), transformed(test)
    columns = []
    for label in range(labels.max() + 1):
        mine = train[labels == label]
        inverse = np.linalg.inv(correlation(mine, gamma_1, gamma_2))
        away = test - mine.mean(0)
        columns.append([row @ inverse @ row for row in away])
    return np.array(columns).T


def made(tiny, network="vit_test", sizes=(2, 1, 3), per_class=12, **options):
    stream = tiny.stream(sizes, per_class)
    return tiny.model(tiny.config("fecam", network, options=options), stream), stream


@pytest.mark.parametrize(
    ("network", "options", "power"),
    [
        ("vit_test", {}, 1.0),
        ("vit_test", {"gamma_2": 0.5}, 1.0),
        ("resnet_test", {}, 0.5),
        ("resnet_test", {"power": 0.3, "gamma_1": 2.0, "gamma_2": 0.5}, 0.3),
        ("resnet_test", {"power": 1.0, "gamma_2": 0.0}, 1.0),
    ],
)
@pytest.mark.parametrize("per_class", [4, 40])  # fewer images than features, and more
def test_task_after_task_it_is_the_definition(
    network: str, options: dict, power: float, per_class: int, tiny
) -> None:
    model, stream = made(tiny, network, per_class=per_class, **options)
    method = model.method
    for task in stream:
        method.learn(task)
        assert method.readout.power == power
        seen = stream[: task.index + 1].merged()[0]
        train, test = (method.features(part).double().numpy() for part in (seen.train, seen.test))
        gammas = options.get("gamma_1", 1.0), options.get("gamma_2", float(power < 1))
        exact = slow_distances(train, seen.train.labels.numpy(), test, power, *gammas)
        logits = method.head()(torch.from_numpy(test).float()).double().detach()
        torch.testing.assert_close(-logits, torch.from_numpy(exact), rtol=2e-3, atol=2e-5)


@given(st.integers(0, 500), st.integers(2, 30), st.integers(2, 12), st.floats(0.05, 5), st.floats(0, 1))
def test_the_low_rank_form_is_the_full_matrix(
    seed: int, count: int, width: int, gamma_1: float, part: float
) -> None:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(count, width)) * rng.uniform(0.1, 3, size=width) + rng.normal(size=(count, 1))
    found = Correlation.of(torch.from_numpy(z), gamma_1, part * gamma_1)
    full = correlation(z, gamma_1, part * gamma_1)
    away = rng.normal(size=(5, width))
    exact = np.einsum("bi,ij,bj->b", away, np.linalg.inv(full), away)
    if np.linalg.cond(full) < 1e4:
        torch.testing.assert_close(
            found.distances(torch.from_numpy(away)), torch.from_numpy(exact), rtol=1e-2, atol=1e-6
        )
    assert found.basis.shape[1] <= count + 1


@both
def test_the_order_of_tasks_does_not_matter(network: str, tiny) -> None:
    one, stream = made(tiny, network, sizes=(6,))
    several, parts = made(tiny, network, sizes=(2, 1, 3))
    one.method.learn(stream[0])
    for task in parts:
        several.method.learn(task)
    images = stream[0].test.batch(torch.arange(12))[0]
    torch.testing.assert_close(several.logits(images), one.logits(images), rtol=1e-4, atol=1e-5)


def test_a_direction_without_spread_is_left_out(tiny) -> None:
    """Features behind a plain LayerNorm sum to 0, with equal gammas the shrunk covariance is singular."""
    model, stream = made(tiny, gamma_2=1.0)
    for task in stream:
        model.method.learn(task)
    logits = model.logits(stream[0].test.batch(torch.arange(12))[0])
    assert bool((logits <= 0).all())
    assert float(logits.min()) > -1e3


def test_negative_features_have_no_root(tiny) -> None:
    model, stream = made(tiny, power=0.5)
    with pytest.raises(CofimaError, match=r"options\.power = 0\.5: a negative feature") as error:
        model.method.learn(stream[0])
    assert "\n" not in str(error.value)


def test_one_image_has_the_identity(tiny) -> None:
    model, stream = made(tiny, sizes=(2, 1))
    model.method.learn(stream[0])
    model.method.learn(replace(stream[1], train=stream[1].train.select(torch.tensor([0]))))
    features = model.method.features(stream[1].test)
    z = model.method.readout.transformed(features)
    mean = model.method.readout.flat()["weight"][2]
    torch.testing.assert_close(
        -model.method.head()(features)[:, 2].detach(), (z - mean).square().sum(1), rtol=1e-4, atol=1e-6
    )


def test_a_folder_of_classes_with_different_numbers_of_images(tiny, tmp_path: Path) -> None:
    stream = tiny.stream((2, 2), 12)
    few = stream[1].train.select(torch.arange(0, len(stream[1].train), 3))
    uneven = replace(stream, tasks=(stream[0], replace(stream[1], train=few)))
    model = tiny.run(tmp_path, tiny.config("fecam"), uneven)
    ranks = [len(matrix.along) for matrix in model.method.readout.matrices]
    assert len(set(ranks)) > 1
    images = stream[0].test.batch(torch.arange(6))[0]
    again = load_model(tmp_path)
    assert torch.equal(again.logits(images), model.logits(images))
    assert [len(matrix.along) for matrix in again.method.readout.matrices] == ranks
    left = remove_class(again, stream[0].names[1])
    others = [0, 2, 3]
    assert torch.equal(left.logits(images), model.logits(images)[:, others])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma_1": 0.5, "gamma_2": 1.0}, "gamma_2 exceeds gamma_1"),
        ({"gamma_1": 0.0}, r"options\.gamma_1"),
        ({"power": 2.0}, r"options\.power"),
        ({"power": 0.0}, r"options\.power"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict, message: str) -> None:
    with pytest.raises(CofimaError, match=message):
        check({"method": "fecam", "options": options})
