"""SLDA: the discriminant analysis of all images at once, however they are divided into tasks."""

from pathlib import Path

import numpy as np
import pytest
import torch

import cofima
from cofima.core.errors import CofimaError
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import from_groups
from cofima.store.model import load_model


def learned(tiny, tmp_path: Path, groups: tuple[int, ...], **options: object):
    stream = tiny.stream(groups, per_class=10)
    return tiny.run(tmp_path, tiny.config("slda", options=options), stream), stream


@pytest.mark.parametrize("groups", [(4,), (1, 3), (2, 1, 1)], ids=str)
def test_it_is_the_discriminant_analysis_of_all_images(groups: tuple[int, ...], tiny, tmp_path: Path) -> None:
    model, stream = learned(tiny, tmp_path, groups, shrinkage=0.3, priors="counts")
    features = torch.cat([model.method.features(task.train) for task in stream]).double().numpy()
    labels = torch.cat([task.train.labels for task in stream]).numpy()
    means = np.stack([features[labels == c].mean(0) for c in range(4)])
    within = features - means[labels]
    covariance = within.T @ within / (len(labels) - 4)
    shrunk = 0.7 * covariance + 0.3 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    weight = np.linalg.solve(shrunk, means.T).T
    bias = np.log(np.bincount(labels) / len(labels)) - (weight * means).sum(1) / 2
    images = torch.cat([task.test.batch(torch.arange(len(task.test)))[0] for task in stream])
    seen = model.method.net.features(model.view.test(images)).double().detach().numpy()
    expected = seen @ weight.T + bias
    assert model.logits(images).numpy() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_the_backbone_stays_and_each_image_passes_once(tiny, tmp_path: Path) -> None:
    model, stream = learned(tiny, tmp_path / "whole", (2, 2))
    fresh = tiny.model(tiny.config("slda"), stream).method.net.backbone.state_dict()
    for key, value in model.method.net.backbone.state_dict().items():
        assert torch.equal(value, fresh[key])
    passed: list[int] = []
    again = tiny.model(tiny.config("slda"), stream)
    again.method.net.backbone.register_forward_pre_hook(lambda _, args: passed.append(len(args[0])))
    again.method.learn(stream[0])
    assert len(passed) == 1  # the picture by which the features of the run before are found again
    assert load_model(tmp_path / "whole").classes == model.classes


def test_merged_models_are_the_model_of_all_classes(tiny, tmp_path: Path) -> None:
    """Models of one backbone that know other classes: their sums add up, and the head is solved again."""
    config, data = tiny.config("slda", options={"shrinkage": 0.3}), blobs(4, 10, 16, 0)
    for name, groups in {"one": [[0, 1]], "two": [[2, 3]], "all": [[0, 1], [2, 3]]}.items():
        tiny.run(tmp_path / name, config, from_groups(data, groups))
    cofima.merge([tmp_path / "one", tmp_path / "two"], tmp_path / "merged")
    whole, merged = load_model(tmp_path / "all"), load_model(tmp_path / "merged")
    assert merged.classes == whole.classes
    images = from_groups(data, [[0, 1, 2, 3]])[0].test.batch(torch.arange(8))[0]
    torch.testing.assert_close(merged.logits(images), whole.logits(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("method", "options"), [("slda", {}), ("ranpac", {"petl": "none"})])
def test_features_that_are_not_finite_are_an_error_and_no_endless_search(
    method: str, options: dict[str, str], tiny
) -> None:
    """No shrinkage and no ridge solves a system with NaN in it."""
    stream = tiny.stream((2,), per_class=4)
    model = tiny.model(tiny.config(method, options=options), stream)
    with torch.no_grad():
        next(model.method.net.backbone.parameters()).fill_(float("nan"))
    with pytest.raises(CofimaError, match="features that are not finite for 8 of 8 images"):
        model.method.learn(stream[0])
