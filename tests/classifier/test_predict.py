"""Predictions: accepted inputs, outputs, and calibration of the probabilities."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import cofima
from cofima.classifier.calibrate import farthest, fit, honest_answers
from cofima.classifier.evaluate import calibration_error
from cofima.core.errors import CofimaError
from cofima.data.loading.decoder import decode_file
from cofima.methods.components.gaussians import ClassGaussians


@pytest.fixture(scope="module")
def files(three: Path) -> list[Path]:
    return sorted((three.parent / "photos").rglob("*.png"))


@pytest.fixture(scope="module")
def clf(three: Path) -> cofima.Classifier:
    return cofima.load(three)


def test_paths_images_arrays_and_tensors_get_the_same_answer(
    clf: cofima.Classifier, files: list[Path]
) -> None:
    image = decode_file(files[0])
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = [files[0], str(files[0]), image, array, array / 255, tensor, tensor.float() / 255]
    rows = torch.cat([clf.probabilities(form) for form in forms])
    assert torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-5)
    assert torch.equal(clf.probabilities(torch.stack([tensor, tensor])), clf.probabilities([array, image]))
    answers = clf.predict(forms, top=3)
    assert {answer.label for answer in answers} == {answers[0].label}
    assert sum(p for _, p in answers[0].best) == pytest.approx(1)
    assert [name for name, _ in answers[0].best] == [
        clf.classes[place] for place in rows[0].argsort(descending=True)
    ]


def test_gray_and_transparent_images_are_taken(clf: cofima.Classifier) -> None:
    gray = np.full((20, 30), 128, np.uint8)
    assert torch.allclose(clf.probabilities(gray), clf.probabilities(np.stack([gray] * 3, axis=2)), atol=1e-6)
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    white = Image.new("RGB", (20, 20), "white")
    assert torch.allclose(clf.probabilities(clear), clf.probabilities(white), atol=1e-6)


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4, 7)), np.full((4, 4), 3.0), np.full((4, 4), 300), torch.zeros(4, 4)]
)
def test_what_is_no_image_is_refused(clf: cofima.Classifier, image: object) -> None:
    with pytest.raises(CofimaError, match=r"must (be|lie)"):
        clf.predict(image)  # type: ignore[arg-type]


def test_an_unreadable_file_gets_an_error_in_its_place(
    clf: cofima.Classifier, files: list[Path], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    asked = [files[0], bad, files[1], tmp_path / "gone.png"] * 20
    answers = clf.predict(asked)
    assert [answer.image for answer in answers] == [str(path) for path in asked]
    assert [bool(answer.error) for answer in answers] == [False, True, False, True] * 20
    assert (answers[1].error, answers[1].label) == ("empty file", "")
    with pytest.raises(CofimaError, match="empty file"):
        clf.probabilities([files[0], bad])


def test_no_images_no_answers(clf: cofima.Classifier) -> None:
    assert clf.predict([]) == []
    assert clf.probabilities([]).shape == (0, 3)


def test_unknown_is_what_lies_farther_than_held_out_images(
    clf: cofima.Classifier, files: list[Path], photos: Callable[..., Path], tmp_path: Path
) -> None:
    answers = clf.predict(files, unknown=0.5)
    assert not all(answer.unknown for answer in answers)
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    strange = clf.predict([noise], unknown=0.5)[0]
    assert strange.unknown
    assert strange.label == "unknown"
    assert strange.best[0][0] in clf.classes
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(CofimaError, match="between 0 and 1"):
            clf.predict(files, unknown=share)


def test_unknown_needs_gaussians_and_held_out_images(
    clf: cofima.Classifier, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(clf.model.serving, "distances", [[], [], []])
    with pytest.raises(CofimaError, match="no image was held out"):
        clf.predict(files, unknown=0.1)
    monkeypatch.setattr(clf.model.method, "gaussians", None)
    with pytest.raises(CofimaError, match="keeps no Gaussian"):
        clf.predict(files, unknown=0.1)


def test_the_limit_leaves_the_share_of_held_out_images_beyond_it(clf: cofima.Classifier) -> None:
    from dataclasses import replace

    values = [float(n) for n in range(1, 101)]
    model = replace(clf.model, serving={"distances": [values[:30], [], values[30:]]})
    assert farthest(model, 0.05) == 95
    assert sum(value > farthest(model, 0.2) for value in values) == 20


def test_the_distance_is_mahalanobis_to_the_nearest_class() -> None:
    chance = torch.Generator().manual_seed(0)
    gaussians = ClassGaussians()
    for shift in (0.0, 5.0, -3.0):
        gaussians.add(torch.randn(50, 4, generator=chance) @ torch.randn(4, 4, generator=chance) + shift)
    asked = torch.randn(7, 4, generator=chance) * 4
    slow = torch.stack(
        [
            torch.stack([(x - m) @ torch.linalg.inv(gaussians.covariance(c)) @ (x - m) for x in asked]).sqrt()
            for c, m in enumerate(gaussians.means)
        ]
    ).amin(0)
    assert torch.allclose(gaussians.nearest(asked), slow, rtol=1e-4)


ONE_TASK = torch.zeros(5, dtype=torch.int64)


def test_the_offset_of_a_task_is_found_and_that_of_one_task_is_none() -> None:
    chance = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3000, 5, generator=chance)
    tasks, true = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0.0, 0, 0, 2, 2])
    labels = torch.multinomial(torch.softmax((logits + true) / 1.5, 1), 1, generator=chance)[:, 0]
    found = fit(logits, labels, tasks)
    assert found.temperature == pytest.approx(1.5, rel=0.1)
    # class weights change the intercepts that equal classes would have
    shares = torch.bincount(labels).double().log()
    gap = found.offsets[3:].mean() - found.offsets[:3].mean()
    assert gap == pytest.approx(2 - 1.5 * float(shares[3:].mean() - shares[:3].mean()), abs=0.4)
    few = torch.randint(len(labels), (30,), generator=chance)
    assert not fit(logits[few], labels[few], ONE_TASK).offsets.any()


def test_few_images_move_an_offset_little_and_many_images_give_a_class_its_own() -> None:
    logits, tasks = torch.zeros(6, 3), torch.tensor([0, 0, 1])
    logits[:, 2] = 2.0  # all taken for the third class, which has none of them
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    few = fit(logits, labels, tasks).offsets
    many = fit(logits.repeat(20, 1), labels.repeat(20), tasks).offsets
    assert 0 > few[2] - few[0] > many[2] - many[0]


def test_honest_answers_do_not_see_the_label_that_they_are_checked_by(three: Path) -> None:
    """Labels at random cannot be answered better than by chance, however the calibration is fitted."""
    model = cofima.load(three).model
    model.tasks = [("a",), ("b",), ("c",)]
    chance = torch.Generator().manual_seed(0)
    logits = torch.zeros(600, 3)
    labels = torch.randint(3, (600,), generator=chance)
    assert float((honest_answers(model, logits, labels) == labels).double().mean()) < 0.42


def test_the_temperature_is_the_one_that_made_the_labels() -> None:
    chance = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(4000, 5, generator=chance)
    for true in (0.5, 3.0):
        labels = torch.multinomial(torch.softmax(logits / true, 1), 1, generator=chance)[:, 0]
        assert fit(logits, labels, ONE_TASK).temperature == pytest.approx(true, rel=0.1)


def test_few_right_answers_do_not_make_a_classifier_certain() -> None:
    labels = torch.arange(10) % 2
    logits = torch.nn.functional.one_hot(labels, 2).float()
    chance = torch.softmax(logits / fit(logits, labels, ONE_TASK[:2]).temperature, 1).amax(1)
    assert 0.85 < float(chance.mean()) < 0.99


def test_the_calibration_error_is_the_gap() -> None:
    assert calibration_error(torch.full((10,), 0.75), torch.arange(10) < 5) == pytest.approx(25)
    assert calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([True, True])) == 0
