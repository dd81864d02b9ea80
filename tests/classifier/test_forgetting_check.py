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
    compare_on_images,
    drop_interval,
)
from cofima.store.held_out import HeldOut

Photos = Callable[..., Path]


def held(features: torch.Tensor, labels: torch.Tensor) -> HeldOut:
    no = torch.zeros(len(labels), dtype=torch.bool)
    return HeldOut(features, labels, no, ~no)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_kept_features_measure_what_their_images_do(model: Path, photos: Photos, tmp_path: Path) -> None:
    """With the backbone as it was, features and images of the same photographs give the same drop."""
    old = cofima.load(model)
    new = cofima.load(model)
    outcome = new.extend(photos(tmp_path / "new", (3, 4)), fast=True)
    images = old.model.images  # all that were held out of each class
    found = compare_on_images(old.model, new.model, images, "")
    moved = Moved(old.model.kept, torch.zeros(0), torch.zeros(0), torch.zeros(0), chance())
    features = compare_on_features(old.model, new.model, moved)
    assert outcome.old.measured
    assert features.before.images == found.before.images
    assert features.before.right == found.before.right
    assert features.after.right == found.after.right


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
    assert "fewer than 3 classes" in str(compare_on_features(old, old, moved))


def test_a_wide_estimate_is_unknown_and_one_without_features_too(model: Path) -> None:
    old = cofima.load(model).model
    before = torch.randn(40, old.width, generator=chance())
    after = before + 50 * torch.randn(4, old.width, generator=chance(1))[torch.arange(40) % 4]
    moved = Moved(old.kept, before, after, torch.arange(40) % 4, chance())
    assert "says too little" in str(compare_on_features(old, old, moved))
    old.held_out = None
    assert "no features" in str(
        compare_on_features(old, old, Moved(old.kept, before, after, before, chance()))
    )


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
    assert left.labels.tolist() == [0, 1, 0, 1]


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
