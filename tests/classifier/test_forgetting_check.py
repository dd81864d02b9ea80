"""Loss of old classes: exact where the backbone stayed, honest where it moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cofima
from cofima.classifier.forgetting_check import (
    WIDEST,
    Moved,
    compare_on_features,
    drop_interval,
)
from cofima.classifier.scoring import held_out_logits
from cofima.methods.components.discriminant import SharedGaussians, discriminant
from cofima.store.held_out import HeldOut

Photos = Callable[..., Path]


def held(features: torch.Tensor, labels: torch.Tensor) -> HeldOut:
    no = torch.zeros(len(labels), dtype=torch.bool)
    return HeldOut(features, labels, no, no, ~no)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_kept_features_are_answered_as_if_the_head_had_not_seen_them(
    model: Path, photos: Photos, tmp_path: Path
) -> None:
    """The slow way: forget an image, solve again, and ask for it."""
    clf = cofima.load(model)
    clf.extend(photos(tmp_path / "new", (3, 4)), fast=True)
    kept, method = clf.model.kept, clf.model.method
    method.closed_form = method.closed_form.model_copy(update={"shrinkage": method.gaussians.shrinkage})
    found = held_out_logits(clf.model, kept)
    for place in (0, 17, 45):
        others = torch.arange(len(kept)) != place
        again = SharedGaussians(clf.model.width, shrinkage=method.gaussians.shrinkage)
        for label in range(5):
            again.add(kept.features[others & (kept.labels == label)])
        weight, bias = discriminant(again, "equal")
        slow = kept.features[place].double() @ weight.T + bias
        assert torch.allclose(found[place].double(), slow, rtol=1e-4, atol=1e-4)


def test_a_frozen_backbone_is_measured_exactly(model: Path, photos: Photos, tmp_path: Path) -> None:
    clf = cofima.load(model)
    clf.model.images = None
    outcome = clf.extend(photos(tmp_path / "new", (3, 4)), fast=True)
    assert outcome.old.measured
    assert outcome.old.rests_on == "measured on the features of 30 images"
    low, high = outcome.old.interval
    assert low <= outcome.old.drop <= high


def test_one_map_for_head_and_features_would_hide_every_loss() -> None:
    """The residuals of classes left out are what tells of it: without them no answer changes."""
    generator = chance()
    before = torch.randn(60, 8, generator=generator)
    labels = torch.arange(60) % 4
    # each current class moves its own way, so that no map fits a class that it has not seen
    after = before + 3 * torch.randn(4, 8, generator=generator)[labels]
    kept = held(torch.randn(20, 8, generator=generator), torch.arange(20) % 2)
    moved = Moved(kept, before, after, labels, generator)
    one, other = moved.draw(), moved.draw()
    assert not torch.equal(one, other)
    assert float((one - moved.mapped).norm(dim=1).mean()) > 2
    assert not moved.held_out().exact.any()


def test_features_stay_where_nothing_moved() -> None:
    features, labels = torch.randn(12, 4, generator=chance()), torch.arange(12) % 3
    moved = Moved(held(features, labels), features, features, labels, chance())
    assert moved.still
    assert [draw is features for draw in moved.draws()] == [True]
    assert moved.held_out().exact.all()


def test_a_linear_drift_is_followed_and_misses_little() -> None:
    generator = chance()
    before = torch.randn(400, 6, generator=generator)
    change = torch.eye(6) + 0.1 * torch.randn(6, 6, generator=generator)
    kept = held(torch.randn(30, 6, generator=generator), torch.arange(30) % 3)
    moved = Moved(kept, before, before @ change, torch.arange(400) % 5, generator)
    assert torch.allclose(moved.draw(), kept.features @ change, atol=0.05)


@pytest.mark.parametrize("classes", [1, 2])
def test_too_few_current_classes_are_unknown(classes: int, model: Path) -> None:
    old = cofima.load(model).model
    before = torch.randn(12, old.width, generator=chance())
    moved = Moved(old.kept, before, before + 1, torch.arange(12) % classes, chance())
    assert "fewer than 3 classes" in str(compare_on_features(old, old, moved, held_out_logits(old, old.kept)))


def test_a_wide_estimate_is_unknown_and_one_without_features_too(model: Path) -> None:
    old = cofima.load(model).model
    before = torch.randn(40, old.width, generator=chance())
    after = before + 50 * torch.randn(4, old.width, generator=chance(1))[torch.arange(40) % 4]
    moved = Moved(old.kept, before, after, torch.arange(40) % 4, chance())
    assert "says too little" in str(compare_on_features(old, old, moved, held_out_logits(old, old.kept)))
    old.held_out = None
    none = Moved(old.kept, before, after, before, chance())
    assert "no features" in str(compare_on_features(old, old, none, held_out_logits(old, old.kept)))


def test_the_interval_holds_the_drop_as_often_as_it_says() -> None:
    """Images are drawn from classes of known accuracies, many times."""
    generator, inside = chance(), []
    labels = torch.arange(9).repeat_interleave(5)
    for _ in range(150):
        was = torch.rand(len(labels), generator=generator) < 0.9
        lost = torch.rand(len(labels), generator=generator) < 0.1
        low, high = drop_interval(was, (was & ~lost)[None], labels)
        inside.append(low <= 9.0 <= high)
    assert 0.8 <= sum(inside) / len(inside) <= 0.99


def test_no_change_among_few_images_is_no_proof() -> None:
    right = torch.ones(6, dtype=torch.bool)
    low, high = drop_interval(right, right[None], torch.arange(6) % 3)
    assert low < 0 < high
    many = torch.ones(3000, dtype=torch.bool)
    low, high = drop_interval(many, many[None], torch.arange(3000) % 3)
    assert high - low < 0.5 < WIDEST


def test_a_class_that_is_removed_takes_its_features_along(model: Path) -> None:
    clf = cofima.load(model)
    kept = clf.model.kept
    clf.remove_class("class 1")
    left = clf.model.kept
    assert torch.equal(left.features, kept.features[kept.labels != 1])
    assert torch.bincount(left.labels).tolist() == [10, 10]


def test_a_moved_backbone_leaves_estimates_that_are_not_reported(
    model: Path, photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where fine-tuning is taken, the accuracy of old classes rests on nothing measured."""
    from cofima.classifier import learn as learning

    gain: Any = learning.gain_of
    monkeypatch.setattr(learning, "gain_of", lambda *rest: gain(*rest).__class__(5.0, 1.0, 10))
    clf = cofima.load(model)
    clf.model.images = None
    clf.extend(photos(tmp_path / "new", (3, 4, 5)), epochs=1)
    kept = clf.model.kept
    assert kept.exact.tolist() == (kept.labels >= 3).tolist()
    assert set(clf.accuracy.images) == {"class 3", "class 4", "class 5"}
    assert clf.history[-1].accuracy[0] is None
