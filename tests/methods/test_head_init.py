"""Rows of new classes that begin as a discriminant: against a slow definition, and where training starts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.methods.base import Method
from cofima.methods.components.cost import Plan
from cofima.methods.components.discriminant import DOUBT, SHARES, discriminant_rows
from cofima.training import loop

TRAINING = [
    name
    for name in methods.names()
    if not methods.find(name).fixed_features and methods.find(name).sees_features_only
]


def clouds(counts: list[int], width: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=g)]
    means, mix = torch.randn(len(counts), width, generator=g), torch.randn(width, width, generator=g)
    return torch.randn(len(labels), width, generator=g) @ mix + 2 * means[labels], labels


def shrunk_logits(x: np.ndarray, y: np.ndarray, share: float, at: np.ndarray) -> np.ndarray:
    """Return the logits of a discriminant with equal priors, straight from its definition."""
    classes = np.unique(y)
    means = np.stack([x[y == c].mean(0) for c in classes])
    rest = x - means[np.searchsorted(classes, y)]
    within = rest.T @ rest / (len(x) - len(classes))
    width = x.shape[1]
    within = (1 - share) * within + share * np.trace(within) / width * np.eye(width)
    solved = np.linalg.solve(within, means.T)
    found: np.ndarray = at @ solved - (means.T * solved).sum(0) / 2
    return found


def best(scores: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    def loss(cold: float) -> float:
        warm = torch.tensor(scores * np.exp(cold))
        return float(cross_entropy(warm, torch.tensor(y), reduction="sum", label_smoothing=DOUBT))

    found = minimize_scalar(loss, bounds=(-12, 3), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x)), float(found.fun)


@pytest.mark.parametrize("width", [5, 40], ids=["more images", "more features"])
def test_the_rows_are_those_of_leaving_each_image_out(width: int) -> None:
    """Each image is left out for real; the share and the factor with the lowest loss are taken."""
    features, labels = clouds([9, 6, 7], width)
    x, y = features.double().numpy(), labels.numpy()
    losses = []
    for share in SHARES:
        left = [
            shrunk_logits(np.delete(x, i, 0), np.delete(y, i), share, x[i : i + 1])[0] for i in range(len(x))
        ]
        losses.append(best(np.stack(left), y))
    share = SHARES[int(np.argmin([loss for _, loss in losses]))]
    scale = losses[SHARES.index(share)][0]
    rows = discriminant_rows(features, labels, 3)
    assert rows is not None
    mine = (features @ rows["weight"].T + rows["bias"]).softmax(1)
    wanted = torch.tensor(scale * shrunk_logits(x, y, share, x)).softmax(1)
    torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=0.01)  # the factor is found to one percent
    assert torch.allclose(rows["weight"].sum(0), torch.zeros(width), atol=1e-4)


def test_many_images_give_scikit_learns_discriminant() -> None:
    features, labels = clouds([4000, 4000], width=3)
    rows = discriminant_rows(features, labels, 2)
    assert rows is not None
    model = LinearDiscriminantAnalysis(priors=[0.5, 0.5]).fit(features.numpy(), labels.numpy())
    mine = (features @ rows["weight"].T + rows["bias"]).argmax(1).numpy()
    assert (mine == model.predict(features.numpy())).mean() > 0.99


def test_one_image_per_class_solves_nothing() -> None:
    assert discriminant_rows(*clouds([1, 1, 1]), 3) is None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Return a list that fills with the head's rows whenever a training loop starts."""
    found: list[dict[str, Tensor]] = []
    sgd = loop.sgd

    def spied(net, *args, **kwargs):
        found.append({key: value.clone() for key, value in net.head.flat().items()})
        return sgd(net, *args, **kwargs)

    monkeypatch.setattr("cofima.methods.base.sgd", spied)
    monkeypatch.setattr("cofima.methods.gdumb.sgd", spied, raising=False)
    return found


def made(tiny, name: str, sizes: tuple[int, ...], head_init: str = "lda", **options) -> tuple:
    stream = tiny.stream(sizes, per_class=6)
    memory = {"memory_size": 36} if "memory_size" in methods.find(name).__dataclass_fields__ else {}
    config = tiny.config(name, train={"epochs": 1, "head_init": head_init}, options=memory | options)
    return tiny.model(config, stream).method, stream


@pytest.mark.parametrize("name", TRAINING)
def test_training_starts_from_the_discriminant_of_its_own_backbone(name: str, tiny, started: list) -> None:
    """The rows are solved from features of the very weights that the loop begins with."""
    method, stream = made(tiny, name, (2, 3))
    solved: list[Tensor] = []
    init: Callable[[Method, object], None] = type(method).init_head

    def spied(task) -> None:
        init(method, task)
        images = method.memory if name == "gdumb" else task.train
        first = 0 if name == "gdumb" else task.classes.start
        rows = discriminant_rows(method.features(images), images.labels - first, task.classes.stop - first)
        solved.append(rows["weight"])

    method.init_head = spied
    for task in method.stream(stream):
        before = method.net.head.flat()["weight"].clone()
        method.learn(task)
        start, rows = started[-1]["weight"], solved[-1]
        assert torch.equal(start[len(start) - len(rows) :], rows)
        if len(rows) < len(start):
            assert torch.equal(start[: len(before)], before)  # rows of old classes go on


def test_rows_are_random_by_default_and_for_a_single_class(tiny, started: list) -> None:
    for head_init in ("random", "lda"):
        method, stream = made(tiny, "slca", (2, 1), head_init)
        for task in stream:
            method.learn(task)
    random, solved = started[:2], started[2:]
    assert not torch.equal(random[0]["weight"], solved[0]["weight"])
    assert torch.equal(random[1]["weight"][2:], solved[1]["weight"][2:])
    assert not random[0]["bias"].any()


def test_features_before_a_task_are_computed_once(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drift and the rows of new classes share them; the plan counts them once, too."""
    method, stream = made(tiny, "coma", (2, 2), drift="linear", classifier="lda")
    calls: list[int] = []
    features = Method.features

    def spied(self, images):
        calls.append(len(images))
        return features(self, images)

    monkeypatch.setattr(Method, "features", spied)
    for task in stream:
        calls.clear()
        method.learn(task)
        assert calls == [len(task.train)] * 2  # before and after training
    plain, solved = (Plan(1, 100, 0, 10, rows) for rows in (False, True))
    assert method.cost(solved).forward - method.cost(plain).forward == pytest.approx(10)


@pytest.mark.parametrize("name", sorted({*methods.names()} - {*TRAINING}))
def test_methods_without_such_a_head_refuse_before_any_work(name: str, tiny) -> None:
    with pytest.raises(CofimaError, match=r"train\.head_init = lda: .* leave it out"):
        made(tiny, name, (2, 2))


def test_too_few_images_are_told(tiny, started: list) -> None:
    stream = tiny.stream((2, 2), per_class=1)
    method = tiny.model(tiny.config("slca", train={"epochs": 1, "head_init": "lda"}), stream).method
    method.learn(stream[0])
    assert any("begin at random" in note for note in method.facts["notes"])
    assert not started[0]["bias"].any()
