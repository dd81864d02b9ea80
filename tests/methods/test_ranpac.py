"""RanPAC: the exact solution over all images, adaptation to the first task alone, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from cofima.core.errors import CofimaError
from cofima.experiment import launch as launching
from cofima.experiment.launch import launch
from cofima.methods.components.projection import best_ridge
from cofima.store.model import load_model
from cofima.training.features import BATCH_SIZE
from cofima.weights import snapshot

PETLS = ("adapter", "ssf", "vpt")
SHORT = {"adapt": {"epochs": 1, "batch_size": 8}}


def made(tiny, sizes=(3, 1, 2), network="vit_test", per_class=12, **options):
    stream = tiny.stream(sizes, per_class)
    return tiny.model(tiny.config("ranpac", network, options=SHORT | options), stream), stream


def hidden(method, images):
    return method.readout.blank.hidden(method.features(images).double())


@pytest.mark.parametrize(
    ("petl", "network"), [*((petl, "vit_test") for petl in (*PETLS, "none")), ("none", "resnet_test")]
)
def test_task_after_task_it_is_the_ridge_regression_on_all_images(petl: str, network: str, tiny) -> None:
    model, stream = made(tiny, network=network, petl=petl, ridge=10.0)
    method = model.method
    for task in stream:
        method.learn(task)
        seen = stream[: task.index + 1].merged()[0].train
        h, targets = hidden(method, seen), one_hot(seen.labels).double()
        ridge = 10.0 * torch.eye(h.shape[1], dtype=torch.float64)
        exact = torch.linalg.solve(h.T @ h + ridge, h.T @ targets)
        flat = method.head().flat()
        torch.testing.assert_close(flat["weight"].double(), exact.T, rtol=1e-4, atol=1e-6)
        weight, used = method.readout.sums.solve(10.0)
        torch.testing.assert_close(weight, exact.T, rtol=1e-5, atol=1e-7)  # features are float32
        assert used == 10.0
        assert not flat["bias"].any()
        with torch.no_grad():
            images = method.context.view.test(seen.batch(torch.arange(len(seen)))[0])
            logits = method.predict(images).double()
        torch.testing.assert_close(logits, h @ exact, rtol=1e-4, atol=1e-4)  # h'W, and no cosine


@pytest.mark.parametrize("petl", PETLS)
def test_only_the_first_task_adapts(petl: str, tiny, same_bits) -> None:
    model, stream = made(tiny, petl=petl)
    method = model.method
    start = snapshot(method.net.backbone)
    method.learn(stream[0])
    first = snapshot(method.net.backbone)
    own = {key for key in start if f".{petl}." in key and not key.endswith(".on")}
    assert own
    assert all(torch.equal(start[key], first[key]) != (key in own) for key in start)
    for task in stream[1:]:
        method.learn(task)
        same_bits(snapshot(method.net.backbone), first)
        assert not any(value.requires_grad for value in method.net.backbone.parameters())


@pytest.mark.parametrize("petl", [*PETLS, "none"])
def test_a_first_task_of_one_class_adapts_nothing_and_says_so(petl: str, tiny) -> None:
    model, stream = made(tiny, sizes=(1, 2), petl=petl)
    images = model.view.test(stream[1].test.batch(torch.arange(5))[0])
    plain = tiny.model(tiny.config("prototype"), stream).method.net.features(images)
    model.method.learn(stream[0])
    notes = " ".join(model.method.facts["notes"])
    assert ("one class" in notes) == (petl != "none")
    assert torch.equal(model.method.net.features(images), plain)
    model.method.learn(stream[1])
    assert torch.equal(model.method.net.features(images), plain)
    assert model.logits(stream[0].test.batch(torch.arange(3))[0]).shape == (3, 3)


def test_a_first_task_of_one_class_stays_unadapted_when_loaded(tiny, tmp_path: Path) -> None:
    config = tiny.config("ranpac", options=SHORT | {"petl": "ssf"})
    stream = tiny.stream((1, 2))
    model = tiny.run(tmp_path, config, stream)
    images = stream[1].test.batch(torch.arange(5))[0]
    assert torch.equal(load_model(tmp_path).logits(images), model.logits(images))


def test_the_ridge_is_chosen_on_each_task_s_own_images(tiny) -> None:
    model, stream = made(tiny, sizes=(2, 1, 2))
    method, expected = model.method, 1.0
    for task in stream:
        method.learn(task)
        chance = method.context.seeds.generator("ridge", task.index)
        if len(task.classes) > 1:  # one class is told from none, whatever the ridge
            labels = task.train.labels
            expected = best_ridge(method.readout.blank, method.features(task.train), labels, chance)
        assert method.readout.chosen == expected
        assert method.facts["notes"][-1] == f"ridge {expected:g}"


def test_fewer_classes_than_chose_last_choose_nothing(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "cofima.methods.components.closed_form.best_ridge",
        lambda head, features, labels, chance: asked.append(len(labels.unique())) or 10.0 ** len(asked),
    )
    model, stream = made(tiny, sizes=(2, 1, 3, 2, 3))
    for task in stream:
        model.method.learn(task)
    assert asked == [2, 3, 3]
    assert model.method.readout.chosen == 1000.0


def test_a_single_image_takes_the_ridge_of_before(tiny) -> None:
    model, stream = made(tiny, sizes=(2, 1))
    model.method.learn(stream[0])
    before = model.method.readout.chosen
    model.method.learn(replace(stream[1], train=stream[1].train.select(torch.tensor([0]))))
    assert model.method.readout.chosen == before
    assert torch.isfinite(model.method.head().flat()["weight"]).all()


@pytest.mark.parametrize("petl", ["none", "adapter"])
def test_each_image_s_features_are_computed_once(petl: str, tiny) -> None:
    model, stream = made(tiny, sizes=(2, 2), per_class=16, petl=petl, adapt={"epochs": 0})
    seen: list = []
    features = model.method.net.features
    model.method.net.features = lambda images: seen.append(len(images)) or features(images)
    for task in stream:
        model.method.learn(task)
        model.method.score(stream[: task.index + 1])
    trained, tested = 64, 32 + 32  # two batches, and two of 16 test images that are filled up
    assert sum(seen) == BATCH_SIZE + trained + tested  # the one picture first


def test_the_projection_is_drawn_from_the_seed_and_not_kept(tiny, tmp_path: Path) -> None:
    config = tiny.config("ranpac", options=SHORT | {"projection": 50})
    model = tiny.run(tmp_path, config, tiny.stream((2, 2)))
    matrix = model.method.readout.blank.matrix
    assert torch.equal(load_model(tmp_path).method.readout.blank.matrix, matrix)
    sizes = [value.numel() for value in (model.weights() | model.method.state()).values()]
    assert matrix.numel() not in sizes
    other = tiny.model(tiny.config("ranpac", seed=4, options={"projection": 50}), tiny.stream((2, 2)))
    assert not torch.equal(other.method.readout.blank.matrix, matrix)


def test_another_projection_than_that_of_the_sums_is_refused(tiny) -> None:
    model, stream = made(tiny, sizes=(2, 2))
    model.method.learn(stream[0])
    state = model.method.state()
    state["readout.projection"] = state["readout.projection"] + 1
    with pytest.raises(CofimaError, match="another random projection"):
        model.method.restore(state)


def test_what_is_kept_grows_with_classes_alone(tiny) -> None:
    model, stream = made(tiny, sizes=(2, 1, 2), projection=32)
    for task in stream:
        model.method.learn(task)
        shapes = {key: tuple(value.shape) for key, value in model.method.state().items()}
        assert shapes == {
            "readout.packed": (32 * 33 // 2,),
            "readout.cross": (32, task.classes.stop),
            "readout.ridge": (),
            "readout.judges": (),
            "readout.projection": (16,),
        }


@pytest.mark.parametrize("petl", PETLS)
def test_a_backbone_that_cannot_be_adapted_is_refused_before_any_work(
    petl: str, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "load_stream", lambda *_: pytest.fail("images were read"))
    config = tiny.config("ranpac", "resnet_test", options={"petl": petl})
    with pytest.raises(CofimaError, match=r"petl=\w+ needs a vision transformer") as error:
        launch(config, tmp_path / "run")
    assert "ResNet" in str(error.value)
    assert "options.petl=none" in str(error.value)
    assert not (tmp_path / "run").exists()
