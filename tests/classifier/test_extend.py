"""Extension by new classes without the old images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cofima
from cofima import methods
from cofima.classifier import measure
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.experiment.launch import launch
from cofima.methods.base import Method
from cofima.store import model_folder

Photos = Callable[..., Path]


@pytest.mark.parametrize("classes", [(3,), (3, 4)])
def test_new_classes_are_learned_and_old_ones_kept(
    classes: tuple[int, ...], model: Path, photos: Photos, tmp_path: Path
) -> None:
    clf = cofima.load(model)
    outcome = clf.extend(photos(tmp_path / "new", classes))
    clf.save()
    again = cofima.load(model)
    assert again.classes == [f"class {label}" for label in (0, 1, 2, *classes)]
    assert outcome.new == again.classes[3:]
    found = again.evaluate(photos(tmp_path / "test", (0, 1, 2, *classes), first=20)).accuracy.by_class
    assert min(found[name] for name in outcome.new) >= 50
    assert sum(found.values()) / len(found) > 60
    assert again.model.images is not None
    assert again.model.images.counts() == dict.fromkeys(range(3 + len(classes)), 2)
    assert len(again.model.serving["distances"]) == 3 + len(classes)
    row = again.history[-1]
    assert row.old.rests_on == "measured on the features of 30 images"
    assert (row.accuracy[1], row.sizes) == (outcome.accuracy.percent, [27, 10 * len(classes)])
    assert row.kept_features == 30 + 10 * len(classes)
    assert row.seconds["total"] >= row.seconds["statistics"] > 0
    assert "cannot be judged" in row.notes[-1]  # two classes do not show what fine-tuning does to old ones


def test_the_classifier_stays_as_it_was_when_learning_fails(
    model: Path, photos: Photos, tmp_path: Path, stop_at: Any, same_bits: Any
) -> None:
    clf = cofima.load(model)
    before = {key: value.clone() for key, value in clf.model.weights().items()}
    stopped = stop_at(1)
    with pytest.raises(stopped):
        clf.extend(photos(tmp_path / "new", (3, 4, 5)), epochs=2)
    same_bits(clf.model.weights(), before)
    same_bits(cofima.load(model).model.weights(), before)
    assert len(clf.classes) == 3


def test_more_images_of_known_classes_are_pooled(model: Path, photos: Photos, tmp_path: Path) -> None:
    clf = cofima.load(model)
    counts = clf.model.method.gaussians.counts
    outcome = clf.extend(photos(tmp_path / "more", (0, 2), first=10))
    assert (outcome.new, outcome.more) == ([], ["class 0", "class 2"])
    assert clf.model.method.gaussians.counts == [counts[0] + 10, counts[1], counts[2] + 10]
    assert len(clf.classes) == 3
    assert clf.history[-1].kind == "more images"
    clf.save()
    assert cofima.load(model).predict(tmp_path / "more" / "class 2" / "090.png")[0].error == ""


def test_new_and_known_classes_may_come_together(model: Path, photos: Photos, tmp_path: Path) -> None:
    clf = cofima.load(model)
    outcome = clf.extend(photos(tmp_path / "both", (1, 3), first=10))
    assert (outcome.new, outcome.more) == (["class 3"], ["class 1"])
    known, new = outcome.rows
    assert (known.kind, known.task, new.kind, new.task) == ("more images", 1, "extend", 2)
    assert (known.sizes, new.sizes) == ([37], [37, 10])  # nine of each old class, and ten new of each
    assert outcome.accuracy.images == {"class 1": 19, "class 3": 10}
    assert known.accuracy == new.accuracy[:1]
    assert clf.classes[-1] == "class 3"


def test_a_broken_budget_keeps_the_old_model(
    model: Path, photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clf = cofima.load(model)
    learn = measure.learn_part

    def careless(learned, *rest, **how):  # type: ignore[no-untyped-def]
        row = learn(learned, *rest, **how)
        learned.method.head().blocks[0].weight.data.zero_()
        learned.method.head().blocks[0].bias.data.fill_(-1e9)
        return row

    monkeypatch.setattr(measure, "learn_part", careless)
    check = photos(tmp_path / "check", (0, 1, 2), first=20)
    new = photos(tmp_path / "new", (3, 4))
    with pytest.raises(
        cofima.ForgettingError, match=r"more than the 5 allowed .*30 images of .*check"
    ) as error:
        clf.extend(new, check=check, max_drop=5)
    assert error.value.comparison.after.mean_of_classes < 10
    assert len(clf.classes) == 3
    assert clf.extend(new, check=check, max_drop=100).old.drop > 50


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        ((2, 3), {"only_new": True}, "already known, where only new classes are asked for: class 2"),
        ((3,), {"max_drop": -1}, "max_drop = -1"),
        ((3,), {"settings": ["options.lam=1"]}, r"train.key=value items only"),
        ((3,), {"settings": ["train.epoch=1"]}, "did you mean 'train.epochs'"),
        ((3,), {"check": "nowhere"}, "no such folder"),
    ],
)
def test_mistakes_are_said_before_any_work(
    classes: tuple[int, ...],
    options: dict[str, Any],
    message: str,
    model: Path,
    photos: Photos,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Method, "learn", lambda *_: pytest.fail("work was done"))
    with pytest.raises(CofimaError, match=message):
        cofima.load(model).extend(photos(tmp_path / "new", classes), **options)


def test_a_name_that_differs_by_case_only_is_refused(model: Path, photos: Photos, tmp_path: Path) -> None:
    folder = photos(tmp_path / "new", (3,))
    (folder / "class 3").rename(folder / "CLASS 1")
    with pytest.raises(CofimaError, match="differs from the known class 'class 1' by case only"):
        cofima.load(model).extend(folder)


VARIANTS: dict[str, dict[str, Any]] = {
    "coma lda": {"classifier": "lda", "drift": "linear"},
    "slca ridge": {"classifier": "ridge", "closed_form": {"projection": 32}},
}


@pytest.fixture(params=[*methods.names(), *VARIANTS])
def learned(
    request: pytest.FixtureRequest, shared: Any, photos: Photos, tiny: Any
) -> tuple[str, cofima.Classifier]:
    """Return a method, or a variant, and two classes learned with it, as small as it can be."""
    name = request.param
    method = name.partition(" ")[0]
    how = tiny.config(method, train={"epochs": 1, "batch_size": 8}, options=dict(VARIANTS.get(name, {})))
    options = [f"options={json.dumps(how.options)}"]
    given = [
        f"method={method}",
        "backbone=vit_test",
        "model.pretrained=false",
        "train.epochs=1",
        "device=cpu",
    ]

    def learn(folder: Path) -> None:
        seen = photos(folder / "photos", (0, 1), per_class=6)
        cofima.learn(seen, folder / "model", settings=[*given, *options])

    return name, cofima.load(shared(f"two classes, {name}", learn) / "model")


def test_every_method_extends_and_removes_a_class_or_refuses_before_any_work(
    learned: tuple[str, cofima.Classifier], tmp_path: Path, photos: Photos
) -> None:
    name, clf = learned
    new, more = photos(tmp_path / "new", (2, 3), per_class=6), photos(tmp_path / "more", (0, 1), 6, first=10)
    if clf.model.method.can_extend:
        outcome = clf.extend(new)
        clf.save(tmp_path / "model")
        again = cofima.load(tmp_path / "model")
        assert again.classes == ["class 0", "class 1", "class 2", "class 3"]
        images = [str(path) for path in sorted(new.rglob("*.png"))[:3]]
        assert torch.equal(again.probabilities(images), clf.probabilities(images))
        fixed = clf.model.method.frozen_backbone or clf.model.method.fixed_features
        exact = clf.model.method.sees_features_only and (fixed or clf.model.method.is_solved)
        assert (outcome.old is not None) == exact, outcome.unknown
        clf = again
    if clf.model.method.can_extend and clf.model.method.can_refine:
        clf.extend(more)
        assert clf.history[-1].kind == "more images"
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Method, "learn", lambda *_: pytest.fail("work was done"))
            with pytest.raises(CofimaError, match=r"cannot be extended|cannot learn more images"):
                clf.extend(more)
    remove_classes(name, clf, tmp_path, photos)


def remove_classes(method: str, clf: cofima.Classifier, tmp_path: Path, photos: Photos) -> None:
    """Remove a class, or see it refused."""
    image = sorted(photos(tmp_path / "known", (0,), per_class=1).rglob("*.png"))[0]
    if clf.model.method.keeps_images:
        with pytest.raises(CofimaError, match="keeps images of its classes"):
            clf.remove_class("class 0")
        return
    logits = clf.model.logits(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    clf.remove_class("class 0")
    left = clf.model.logits(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    assert torch.allclose(left, logits[:, 1:], atol=1e-6)
    remains = method.startswith(("ranpac", "slda")) or method in VARIANTS
    assert remains == any("'class 0' is removed, but" in note for note in clf.history[-1].notes)
    clf.save(tmp_path / "model")
    again = cofima.load(tmp_path / "model")
    assert "class 0" not in [name for name, _ in again.predict(image, top=9)[0].best]


# rows of classes, a Fisher, prompts, a matrix of all classes, a teacher: what others keep is of these kinds
EMPTIED = ("cofima", "ewc", "l2p", "ranpac", "lwf")


@pytest.mark.parametrize(
    "learned",
    [
        pytest.param(name, marks=() if name in EMPTIED else pytest.mark.slow)
        for name in (*methods.names(), *VARIANTS)
        if methods.find(name.partition(" ")[0]).can_extend
        and not methods.find(name.partition(" ")[0]).keeps_images
    ],
    indirect=True,
)
def test_all_classes_of_a_task_may_go_and_others_come(
    learned: tuple[str, cofima.Classifier], tmp_path: Path, photos: Photos
) -> None:
    _, clf = learned
    clf.extend(photos(tmp_path / "new", (2, 3), per_class=6))
    clf.remove_class("class 0")
    clf.remove_class("class 2")
    clf.remove_class("class 3")  # their task is empty now
    clf.save(tmp_path / "model")
    again = cofima.load(tmp_path / "model")
    again.extend(photos(tmp_path / "newer", (4, 5), per_class=6))
    assert again.classes == ["class 1", "class 4", "class 5"]


@pytest.mark.parametrize("preset", ["timm", "slca", "pilot"])
def test_a_run_s_model_can_be_extended(preset: str, tmp_path: Path, photos: Photos, tiny: Any) -> None:
    how = {"dataset": f"folder:{photos(tmp_path / 'first', range(4))}", "data": {"preset": preset}}
    launch(tiny.config("coma", train={"epochs": 1}, **how), tmp_path / "run")
    clf = cofima.load(tmp_path / "run")
    clf.extend(photos(tmp_path / "new", (6,)))
    clf.save()
    assert model_folder.current(tmp_path / "run").name == "0003"
    assert cofima.load(tmp_path / "run").classes[-1] == "class 6"


def test_photographs_that_were_learned_before_are_noticed(
    model: Path, photos: Photos, tmp_path: Path
) -> None:
    folder = photos(tmp_path / "all", (1, 3))  # as the folder of before, with one class more
    with pytest.warns(CofimaWarning, match=r"learned before .*\(at least 10, of class 1\).*cofima undo"):
        cofima.load(model).extend(folder, fast=True)
    cofima.load(model).extend(photos(tmp_path / "more", (1, 3), first=20), fast=True)  # a warning is an error
