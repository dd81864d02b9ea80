"""A classifier whose head sees power-normalized features: every command works, or refuses in one sentence."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cofima
from cofima.classifier.calibrate import calibrate
from cofima.classifier.export.plain_timm import to_timm
from cofima.classifier.scoring import drawn_logits, held_out_logits
from cofima.core.errors import CofimaError


@pytest.fixture(scope="module")
def power(shared: Callable[..., Path], photos: Callable[..., Path], settings: tuple[str, ...]) -> Path:
    """Return a model folder that has learned three classes, then a single one."""

    def learn(folder: Path) -> None:
        where = folder / "model"
        chosen = (*settings, "options.closed_form.features=power")
        known = cofima.learn(photos(folder / "photos", (0, 1, 2)), where, settings=chosen, fast=True)
        known.extend(photos(folder / "more", (3,)), fast=True)
        known.save()

    return shared("power", learn) / "model"


def test_it_learns_extends_and_is_loaded_as_it_was(
    power: Path, photos: Callable[..., Path], tmp_path: Path
) -> None:
    classifier = cofima.load(power)
    fresh = photos(tmp_path / "test", (0, 1, 2, 3), first=20)
    evaluation = classifier.evaluate(fresh)
    assert evaluation.accuracy.percent is not None
    assert evaluation.accuracy.percent >= 85
    assert classifier.history[-1].old is not None  # the loss of old classes was measured
    image = next(fresh.rglob("*.png"))
    assert classifier.predict(image, unknown=0.05)[0].label is not None


def test_drawn_features_are_not_normalized_again(power: Path) -> None:
    """Calibration draws features of classes of which none are kept."""
    model = cofima.load(power).model
    centers = torch.stack(model.method.class_statistics().means)  # of features that are normalized
    assert drawn_logits(model, centers).argmax(1).tolist() == [0, 1, 2, 3]
    kept = model.kept
    mine = kept.labels != 1
    logits = held_out_logits(model, kept)
    calibrate(model, logits[mine], kept.labels[mine])
    assert model.serving["calibrated_on"]["drawn_features"] > 0
    assert 0 < model.serving["temperature"] < float("inf")


def test_a_class_is_removed(power: Path) -> None:
    classifier = cofima.load(power)
    classifier.remove_class("class 1")
    assert classifier.classes == ["class 0", "class 2", "class 3"]
    assert len(classifier.model.method.class_statistics()) == 3


def test_merging_and_plain_timm_refuse_it(power: Path, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match="predicts with power-normalized features beside backbone and head"):
        cofima.merge([power, power], tmp_path / "merged")
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with pytest.raises(CofimaError, match="predicts with power-normalized features beside the backbone"):
        to_timm(cofima.load(power).model, tmp_path / "plain.safetensors", images)


def test_other_heads_refuse_the_option() -> None:
    from cofima.experiment.config import check

    with pytest.raises(CofimaError, match=r"closed_form\.features=power: only for classifier=lda"):
        check({"method": "coma", "options": {"closed_form": {"features": "power"}}})
