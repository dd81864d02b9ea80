"""The wrapper keeps scikit-learn's promises, and those of cofima: new classes without old images."""

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator

from cofima import ImageClassifier

QUICK: dict[str, Any] = {
    "backbone": "vit_test",
    "method": "ranpac",
    "settings": ("model.pretrained=false", "options.petl=none", "options.projection=96", "device=cpu"),
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
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_s_own_checks() -> None:
    found = check_estimator(ImageClassifier(**QUICK), on_fail=None, on_skip=None)
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
