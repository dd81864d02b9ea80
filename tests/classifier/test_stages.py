"""Two stages of learning: a closed-form head after one pass, and fine-tuning only if it gains."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cofima
from cofima.classifier import classifier as interface
from cofima.classifier import learn as learning
from cofima.classifier.measure import PENDING, why_unseen
from cofima.classifier.stages import Effort, FineTuning, Gain, gain_of, plan_fine_tuning
from cofima.core.errors import CofimaError
from cofima.data.sources.listing import find_images
from cofima.store import model_folder
from cofima.store.history import HistoryRow
from cofima.store.record import FEATURES

Photos = Callable[..., Path]


def learned(photographs: Path, settings: tuple[str, ...], **how: Any) -> cofima.Classifier:
    return cofima.learn(photographs, settings=[one for one in settings if "epochs=6" not in one], **how)


def test_the_first_stage_leaves_the_backbone_and_takes_one_pass(
    tmp_path: Path, photos: Photos, settings: tuple[str, ...], same_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = []
    whole = learning.Net.features

    def counted(net, images):  # type: ignore[no-untyped-def]
        passed.append(len(images))
        return whole(net, images)

    monkeypatch.setattr(learning.Net, "features", counted)
    made = learned(photos(tmp_path / "p", (0, 1, 2)), settings, fast=True)
    assert sum(passed) == 30  # each image once, held out or not
    fresh = learning.empty_model(made.model.config)
    same_bits(fresh.method.net.backbone.state_dict(), made.model.method.net.backbone.state_dict())
    assert made.accuracy.images == dict.fromkeys(made.classes, 10)  # nothing was chosen: all are reported on
    assert made.history[0].notes[-1].endswith("as asked (fast)")


def test_fast_is_refused_for_a_method_that_must_train_first(tmp_path: Path, photos: Photos) -> None:
    with pytest.raises(CofimaError, match="Seq FT has no answer before it has trained"):
        cofima.learn(photos(tmp_path / "p", (0, 1)), method="seq_ft", backbone="vit_micro", fast=True)


@pytest.fixture
def first(tmp_path: Path, photos: Photos, settings: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a model after its first stage, and the images that it learned."""
    folder = photos(tmp_path / "p", (0, 1, 2))
    model = learned(folder, settings, fast=True).model
    read = find_images(folder).read(model.view.pixel_format)
    return model, read.split(model.classes, model.classes, 0.15, 0)


def row(seconds: float) -> list[HistoryRow]:
    return [HistoryRow(kind="learn", task=1, classes=[], seconds={"statistics": seconds})]


@pytest.mark.parametrize(
    ("pass_seconds", "minutes", "epochs"),
    [(0.001, None, 10), (1.0, 1.0, 10), (1.0, 0.4, 6), (1.0, 0.2, 2), (10.0, 0.2, 0)],
)
def test_the_pass_decides_the_number_of_epochs(
    pass_seconds: float, minutes: float | None, epochs: int, first: tuple[Any, Any]
) -> None:
    """An epoch takes three times the pass, and CoFiMA's Fisher information and statistics once 4.9 times."""
    found = planned(first, Effort(minutes=minutes), seconds=pass_seconds)
    assert bool(found.refused) == (epochs == 0)
    assert found.refused or found.how.epochs == epochs


def test_given_epochs_and_decided_ones_are_not_a_matter_of_time(first: tuple[Any, Any]) -> None:
    given = planned(first, Effort(epochs_given=True), seconds=1e6, wrong=0)
    assert given.how == first[0].config.train
    assert planned(first, Effort(decided=3), seconds=1e6).how.epochs == 3


def test_what_time_decided_is_an_option_of_the_command_that_repeats_it(
    first: tuple[Any, Any],
    tmp_path: Path,
    photos: Photos,
    settings: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert planned(first, Effort(minutes=0.4), seconds=1.0).repeat == "--epochs 6"
    assert planned(first, Effort(minutes=0.2), seconds=10.0).repeat == "--fast"
    assert planned(first, Effort(decided=3)).repeat == "--epochs 3"
    for known in (Effort(epochs_given=True), Effort(epochs_given=True, decided=3), Effort(fast=True)):
        assert not planned(first, known).repeat
    assert not planned(first, Effort(), wrong=0).repeat  # refused, on any machine
    monkeypatch.setattr(Gain, "counts", True)
    folder = photos(tmp_path / "again", (0, 1, 2))
    made = learned(folder, settings, minutes=10)
    assert made.history[0].command.endswith(
        f"{settings[-1].split('=')[0]}={Path(settings[-1]).name} --epochs 10"
    )
    same = learned(folder, settings, epochs=10)
    assert torch.equal(
        same.probabilities(sorted(folder.rglob("*.png"))), made.probabilities(sorted(folder.rglob("*.png")))
    )


def test_nothing_is_fine_tuned_that_cannot_be_judged_or_gained(first: tuple[Any, Any]) -> None:
    model, split = first
    none = replace(split, choose=split.choose.select(split.choose.labels < 0))
    assert "held out" in planned((model, none), Effort()).refused
    two = replace(split, train=split.train.select(split.train.labels < 2))
    assert "cannot be judged" in planned((model, two), Effort(), before=model).refused
    assert "none of the 9 images that would judge it is taken" in planned(first, Effort(), wrong=0).refused
    assert "of the 9 images that would judge it too few are" in planned(first, Effort(), wrong=4).refused
    assert not planned(first, Effort(), wrong=5).refused
    assert "taught the head" in planned(first, Effort(), before=model).refused
    assert not planned(first, Effort(epochs_given=True), before=model).refused


def test_old_features_that_taught_the_head_do_not_judge_fine_tuning(
    tmp_path: Path, photos: Photos, settings: tuple[str, ...]
) -> None:
    """With a changed backbone, the head has memorized old features: only images of new classes may judge."""
    clf = learned(photos(tmp_path / "p", (0, 1, 2)), settings, fast=True)
    clf.extend(photos(tmp_path / "more", (3, 4, 5)), epochs=1)
    assert "on 3 held-out images" in clf.history[-1].notes[-1]


def planned(
    first: tuple[Any, Any], effort: Effort, *, seconds: float = 0, wrong: int = 9, before: Any = None
) -> FineTuning:
    model, split = first
    labels = torch.arange(9) % 3
    best = gain_of((torch.arange(9) >= wrong).double(), torch.ones(9), labels)
    return plan_fine_tuning(model, before, row(seconds), [split], model.config.train, effort, best)


def test_a_gain_counts_beyond_its_noise() -> None:
    labels, was = torch.tensor([0, 0, 0, 1]), torch.tensor([1.0, 0, 0, 1])
    same = gain_of(was, was, labels)
    assert (same.points, same.noise, same.counts) == (0, 0, False)
    one = gain_of(was, torch.tensor([1.0, 1, 0, 1]), labels)  # a third of one of two classes
    assert one.points == pytest.approx(100 / 6)
    assert one.noise == pytest.approx(100 / 6)
    assert not one.counts
    assert not Gain(2.0, 1.0, 10).counts  # chance alone does as well in one of forty cases
    assert Gain(2.1, 1.0, 10).counts
    assert not gain_of(was[:0], was[:0], labels[:0]).counts


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_is_interrupted_keeps_the_first_answer_and_the_same_command_continues(
    tmp_path: Path,
    photos: Photos,
    settings: tuple[str, ...],
    same_bits: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result equals that of an uninterrupted command: the same weights, and nothing to undo."""
    folder, how = photos(tmp_path / "p", (0, 1, 2)), {"settings": settings}
    whole = cofima.learn(folder, tmp_path / "whole", **how)
    with monkeypatch.context() as context:
        context.setattr(learning, "_better", _interrupt)
        with pytest.raises(KeyboardInterrupt) as stopped:
            cofima.learn(folder, tmp_path / "m", **how)
    assert "has the first answer" in stopped.value.kept
    record = model_folder.read(tmp_path / "m").record
    assert record.serving[PENDING]["epochs"] == 6
    answer = cofima.load(tmp_path / "m")
    assert answer.predict(sorted(folder.rglob("*.png"))[0])[0].label == "class 0"
    with pytest.raises(CofimaError, match="holds a model already"):
        cofima.learn(folder, tmp_path / "m", settings=[*settings, "train.lr=0.001"])
    again = cofima.learn(folder, tmp_path / "m", **how)
    same_bits(again.model.weights(), whole.model.weights())
    assert PENDING not in model_folder.read(tmp_path / "m").record.serving
    with pytest.raises(CofimaError, match="nothing to undo"):
        model_folder.undo(tmp_path / "m")


def test_an_interrupted_extension_continues_from_the_model_before(
    model: Path, tmp_path: Path, photos: Photos, same_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, before = photos(tmp_path / "new", (3, 4, 5)), model_folder.current(model).name
    whole = cofima.load(model)
    whole.extend(new, epochs=2)
    with monkeypatch.context() as context:
        context.setattr(learning, "_better", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            cofima.load(model).extend(new, epochs=2, folder=model)
    assert len(cofima.load(model).classes) == 6
    again = cofima.load(model)
    again.extend(new, epochs=2, folder=model)
    assert again.classes == whole.classes
    same_bits(again.model.weights(), whole.model.weights())
    _, now = model_folder.undo(model)
    assert now.name == before
    assert interface.load(model).classes == whole.classes[:3]


def test_a_saved_model_keeps_no_features_if_asked(
    tmp_path: Path, photos: Photos, settings: tuple[str, ...]
) -> None:
    made = learned(
        photos(tmp_path / "p", (0, 1)), settings, fast=True, keep_features=False, folder=tmp_path / "m"
    )
    assert made.calibrated
    assert not len(cofima.load(tmp_path / "m").model.kept)
    assert not (model_folder.current(tmp_path / "m") / FEATURES).exists()
    assert "--fast --no-keep-features" in made.history[0].command
    assert why_unseen(made.model) == "each judged by all others"  # though nothing kept tells
    made.extend(photos(tmp_path / "new", (2,)), fast=True)
    assert not len(made.model.kept)  # as before
