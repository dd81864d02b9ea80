"""The estimator follows scikit-learn's API, and learns new classes without the old images."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator

import cofima
from cofima import ImageClassifier

QUICK: dict[str, Any] = {
    "backbone": "vit_test",
    "method": "ranpac",
    "settings": ("model.pretrained=false", "options.petl=none", "options.projection=96", "device=cpu"),
}


SOLVED: dict[str, Any] = {
    "backbone": "vit_test",
    "settings": ("model.pretrained=false", "device=cpu", "data.flip=false", "data.crop=1"),
}


def pictures(classes: tuple[str, ...], count: int = 8, first: int = 0) -> tuple[Any, Any]:
    colors = {"red": (220, 30, 30), "green": (30, 190, 40), "blue": (30, 60, 220), "yellow": (230, 220, 40)}
    images, labels = [], []
    for name in classes:
        for number in range(first, first + count):
            noise = np.random.default_rng([number, len(name)]).normal(0, 12, (20, 24, 3))
            images.append((np.array(colors[name]) + noise).clip(0, 255).astype(np.uint8))
            labels.append(name)
    return np.stack(images), np.array(labels)


@pytest.mark.slow
@pytest.mark.parametrize("given", [QUICK, SOLVED], ids=["ranpac", "the default method"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_s_own_checks(given: dict[str, Any]) -> None:
    known = "the last bits of features depend on the images of a batch, and a discriminant shows them"
    expected = {"check_methods_subset_invariance": known} if given is SOLVED else None
    found = check_estimator(
        ImageClassifier(**given), on_fail=None, on_skip=None, expected_failed_checks=expected
    )
    failed = {one["check_name"]: repr(one["exception"]) for one in found if one["status"] == "failed"}
    assert not failed
    assert sum(one["status"] == "passed" for one in found) > 40


@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_classifier_data_not_an_array,
        estimator_checks.check_estimators_nan_inf,
        estimator_checks.check_estimators_partial_fit_n_features,
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_supervised_y_2d,
    ],
    ids=lambda check: str(check.__name__),
)
@pytest.mark.filterwarnings("ignore")
def test_some_of_them_every_day(check: Any) -> None:
    check("ImageClassifier", ImageClassifier(**QUICK))


def test_images_are_learned_and_new_classes_follow_without_the_old_images() -> None:
    classifier = ImageClassifier(**QUICK)
    classifier.partial_fit(*pictures(("red", "green")))
    assert classifier.classes_.tolist() == ["green", "red"]
    classifier.partial_fit(*pictures(("blue",)))
    classifier.partial_fit(*pictures(("yellow", "red"), first=20))
    assert classifier.classes_.tolist() == ["green", "red", "blue", "yellow"]
    images, labels = pictures(("red", "green", "blue", "yellow"), count=4, first=50)
    assert classifier.score(images, labels) == 1.0
    chances = classifier.predict_proba(images)
    assert chances.shape == (16, 4)
    np.testing.assert_allclose(chances.sum(1), 1)
    assert (classifier.classes_[chances.argmax(1)] == classifier.predict(images)).all()


def test_it_learns_as_the_commands_do_with_a_still_backbone(tmp_path: Path) -> None:
    """The same images from files, by ``cofima.learn`` and ``extend``, get the same answers."""
    first, more = pictures(("red", "green")), pictures(("blue", "red"), first=20)
    for name, (images, labels) in {"first": first, "more": more}.items():
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            (tmp_path / name / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / name / label / f"{number:02d}.png")
    by_files = cofima.learn(tmp_path / "first", fast=True, seed=0, **SOLVED)
    by_files.extend(tmp_path / "more", fast=True)
    classifier = ImageClassifier(**SOLVED).fit(*first).partial_fit(*more)
    assert classifier.classes_.tolist() == by_files.classes
    assert {row.epochs for row in classifier.model_.history} == {row.epochs for row in by_files.history}
    images = pictures(("red", "green", "blue"), count=4, first=50)[0]
    found, expected = classifier.predict_proba(images), by_files.probabilities(list(images)).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)  # images calibrate in another order
    assert classifier.to_classifier().calibrated


def test_fine_tuning_is_asked_for() -> None:
    images, labels = pictures(("red", "green", "blue"), count=10)
    still = ImageClassifier(**SOLVED).fit(images, labels).model_
    trained = ImageClassifier(**SOLVED, fine_tune=True, epochs=1).fit(images, labels).model_
    assert "as asked (fast)" in still.history[-1].notes[-1]
    assert "fine-tuning for at most 1 epoch" in trained.history[-1].notes[-1]
    assert len(still.history) == len(trained.history) == 1


def test_flattened_images_are_the_same_images() -> None:
    images, labels = pictures(("red", "green", "blue"))
    whole = ImageClassifier(**QUICK).fit(images, labels)
    flat = ImageClassifier(**QUICK, image_shape=(20, 24, 3)).fit(images.reshape(len(images), -1), labels)
    np.testing.assert_array_equal(
        whole.predict_proba(images), flat.predict_proba(images.reshape(len(images), -1))
    )
    with pytest.raises(ValueError, match="another number"):
        flat.fit(images.reshape(len(images), -1)[:, :-3], labels)


def test_it_works_in_scikit_learn_s_tools_and_survives_a_pickle() -> None:
    images, labels = pictures(("red", "green", "blue"))
    assert cross_val_score(ImageClassifier(**QUICK), images, labels, cv=2).mean() > 0.9
    fitted = ImageClassifier(**QUICK).fit(images, labels)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(images), fitted.predict_proba(images))
    assert not hasattr(clone(fitted), "model_")
    assert again.to_classifier().predict(images[0])[0].label == "red"


def test_what_a_method_cannot_learn_is_refused_before_any_work() -> None:
    classifier = ImageClassifier(**(QUICK | {"method": "prototype", "settings": ("model.pretrained=false",)}))
    classifier.fit(*pictures(("red", "green")))
    if not classifier.model_.method.can_refine:
        with pytest.raises(ValueError, match="cannot learn more images of known classes"):
            classifier.partial_fit(*pictures(("red",)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        classifier.predict(pictures(("red",))[0].astype(float))
