"""The contract that every method keeps. A new method is found here by its file; nothing is edited for it."""

import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.data.image_set import ImageSet
from cofima.data.stream import Stream, Task
from cofima.experiment.config import check
from cofima.experiment.launch import launch
from cofima.store import model_folder
from cofima.store.history import dump_rows, parse_rows
from cofima.store.model import Model, load_model, save_model
from cofima.training.evaluate import evaluate

T = TypeVar("T")

# options that change what a method keeps and predicts with, beside every method as it is
VARIANTS: dict[str, dict[str, Any]] = {
    "coma lda": {"classifier": "lda"},
    "cofima drift": {"drift": "linear"},
    "weight_ensemble lda drift": {"classifier": "lda", "drift": "linear"},
    "slca ridge": {"classifier": "ridge", "closed_form": {"projection": 64}},
}
NAMES = [*methods.names(), *VARIANTS]
every_method = pytest.mark.parametrize("name", NAMES)
every_pair = pytest.mark.parametrize(
    ("name", "network"),
    [
        (name, network)
        for name in NAMES
        for network in ("vit_test", "resnet_test")
        if network == "vit_test" or (name not in VARIANTS and not methods.find(name).needs_vit)
    ],
)


def configured(tiny: Any, name: str, network: str = "vit_test", **more: Any) -> Any:
    """Return the configuration of a method or variant."""
    return tiny.config(name.partition(" ")[0], network, options=dict(VARIANTS.get(name, {})), **more)


class StoppedError(Exception):
    """The end of the first process."""


class Tripwire(Progress):
    """Stop a run in the middle of a task, whatever the method is doing there."""

    def __init__(self, task: int, item: int = 3) -> None:
        self.task, self.left, self.stage_now = task, item, ""

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        self.stage_now = label
        yield

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        for item in items:
            if f"task {self.task}/" in self.stage_now:
                self.left -= 1
                if not self.left:
                    raise StoppedError
            yield item


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return everything that is kept of a model."""
    generation = model_folder.current(folder)
    weights = {f"model.{k}": v for k, v in load_file(generation / model_folder.WEIGHTS).items()}
    return weights | {f"state.{k}": v for k, v in load_file(generation / model_folder.STATE).items()}


def scores(model: Model) -> list[Any]:
    return [(row.accuracy, row.top5, row.task_aware, row.lam, row.distance) for row in model.history]


def learn_all(model: Model, stream: Stream) -> Model:
    """Learn without writing anything."""
    for task in model.method.stream(stream):
        model.method.learn(task)
        model.tasks.append(task.names)
    return model


def kept(model: Model) -> dict[str, Tensor]:
    return model.weights() | {f"state.{k}": v for k, v in model.method.state().items()}


@every_pair
def test_resume_equals_an_uninterrupted_run(name: str, network: str, tiny, tmp_path: Path, same_bits) -> None:
    config = configured(tiny, name, network, train={"epochs": 2})
    whole = launch(config, tmp_path / "whole")
    stopped = min(2, whole.planned)
    with pytest.raises(StoppedError):
        launch(config, tmp_path / "cut", Tripwire(stopped))
    assert (model_folder.current(tmp_path / "cut") is None) == (stopped == 1)
    if whole.planned > 2:  # and once more, later
        with pytest.raises(StoppedError):
            launch(config, tmp_path / "cut", Tripwire(3, item=1))
    cut = launch(config, tmp_path / "cut")
    same_bits(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))
    assert scores(cut) == scores(whole)
    assert cut.tasks == whole.tasks


@pytest.mark.parametrize("name", [name for name in methods.names() if methods.find(name).needs_vit])
def test_a_backbone_that_does_not_suit_is_refused_before_any_work(
    name: str, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(name, "resnet_test")
    with pytest.raises(
        CofimaError, match=r"needs a vision transformer .* this backbone is a ResNet"
    ) as error:
        tiny.model(config, tiny.stream())
    assert "\n" not in str(error.value)
    monkeypatch.setattr("cofima.data.datasets.load", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(CofimaError, match=f"{methods.find(name).label} needs a vision transformer"):
        launch(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@every_pair
def test_the_same_seed_gives_the_same_bits_and_another_differs(
    name: str, network: str, tiny, same_bits
) -> None:
    stream = tiny.stream((2, 2), per_class=6)
    made = []
    for seed, noise in ((3, 1), (3, 2), (4, 1)):
        torch.manual_seed(noise)
        np.random.seed(noise)
        random.seed(noise)
        config = configured(tiny, name, network, train={"epochs": 1}, seed=seed)
        made.append(kept(learn_all(tiny.model(config, stream), stream)))
    same_bits(made[0], made[1])
    assert any(not torch.equal(made[0][key], made[2][key]) for key in made[0])


@pytest.mark.parametrize("sizes", [(3, 1, 2), (1, 1, 1, 1), (1, 3), (4,)], ids=str)
@every_method
def test_any_sizes_of_tasks_and_logits_for_the_classes_seen(name: str, sizes: tuple[int, ...], tiny) -> None:
    stream = tiny.stream(sizes, per_class=6)
    model = tiny.model(configured(tiny, name, train={"epochs": 1}), stream)
    seen = model.method.stream(stream)
    for task in seen:
        model.method.learn(task)
        logits = model.logits(stream[0].test.batch(torch.arange(3))[0])
        assert logits.shape == (3, task.classes.stop)
        assert torch.isfinite(logits).all()
        score = evaluate(model.method.predict, seen[: task.index + 1], model.method.context)
        assert all(0 <= accuracy <= 100 for accuracy in score.accuracy)
    for key, value in kept(model).items():
        assert not value.is_floating_point() or torch.isfinite(value).all(), key
        assert not value.requires_grad or key in model.weights()


@every_method
def test_better_than_chance(name: str, tiny, tmp_path: Path, pretrained: Path) -> None:
    """From weights that are worth staying close to, which is what many methods do."""
    how = {"model": {"checkpoint": str(pretrained)}, "train": {"epochs": 8, "lr": 0.02}}
    model = launch(configured(tiny, name, **how), tmp_path)
    last = model.history[-1]
    assert np.average(last.accuracy, weights=last.sizes) > 1.8 * 100 / 6
    assert np.average(last.task_aware, weights=last.sizes) > 60


class Forbidden:
    """Test images that nobody may look at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the test images were looked at: {name}")

    def __len__(self) -> int:
        raise AssertionError("the test images were counted")


@every_pair
def test_the_test_set_is_not_looked_at_while_learning(name: str, network: str, tiny) -> None:
    stream = tiny.stream((2, 1, 2), per_class=6)
    model = tiny.model(configured(tiny, name, network, train={"epochs": 1}), stream)
    for task in model.method.stream(stream):
        model.method.learn(replace(task, test=Forbidden()))


def alone(task: Task, seed: int) -> Task:
    """Return a task in a world where every image but its own training images is noise."""
    noise = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, task.train.pixels.shape, dtype=torch.uint8, generator=noise)
    pixels[task.train.rows] = task.train.pixels[task.train.rows]
    return replace(task, train=ImageSet(pixels, task.train.rows, task.train.labels), test=Forbidden())


@every_method
def test_a_task_is_learnt_from_its_own_training_images_alone(name: str, tiny, same_bits) -> None:
    """Images of other tasks, and all test images, may be anything: not one bit depends on them."""
    stream = tiny.stream((2, 1, 2), per_class=6)
    config = configured(tiny, name, train={"epochs": 2})
    whole = learn_all(tiny.model(config, stream), stream)
    model = tiny.model(config, stream)
    for task in model.method.stream(stream):
        model.method.learn(alone(task, seed=task.index))
    same_bits(kept(model), kept(whole))


@every_method
def test_no_image_of_another_task_is_read(name: str, tiny, spied_images) -> None:
    """A method that keeps no images reads those of the task at hand, and no others."""
    stream = tiny.stream((2, 1, 2), per_class=6)
    model = tiny.model(configured(tiny, name, train={"epochs": 1}), stream)
    read: list[int] = []
    for task in model.method.stream(stream):
        read.clear()
        train = spied_images(task.train, lambda index=task.index: read.append(index))
        test = spied_images(task.test, lambda: read.append(-1))
        model.method.learn(replace(task, train=train, test=test))
        assert set(read) == {task.index} or model.method.keeps_images
        assert -1 not in read


@every_method
def test_images_are_kept_only_by_methods_that_say_so_and_within_their_size(
    name: str, tiny, tmp_path: Path
) -> None:
    """A memory holds copies of training images of tasks learned, with their labels, counted in bytes."""
    stream = tiny.stream((2, 1, 2), per_class=10)
    model = tiny.model(configured(tiny, name, train={"epochs": 1}), stream)
    learned: set[tuple[bytes, int]] = set()
    for task in model.method.stream(stream):
        model.method.learn(task)
        pixels, labels = task.train.batch(torch.arange(len(task.train)))
        learned |= {(p.numpy().tobytes(), y) for p, y in zip(pixels, labels.tolist(), strict=True)}
        images = {key: value for key, value in model.method.state().items() if value.dtype == torch.uint8}
        assert bool(images) == model.method.keeps_images
        for key, value in images.items():
            assert 0 < len(value) <= model.method.memory_size < len(learned) or task.index == 0
            labels = model.method.state()[key.replace("pixels", "labels")].tolist()
            assert {(p.numpy().tobytes(), y) for p, y in zip(value, labels, strict=True)} <= learned
    if model.method.keeps_images:
        history = tiny.run(tmp_path, configured(tiny, name, train={"epochs": 1}), stream).history
        assert history[-1].state_bytes >= sum(value.numel() for value in images.values()) > 0


@every_pair
def test_scoring_changes_nothing(name: str, network: str, tiny, same_bits) -> None:
    for sizes in ((1, 2), (2, 2)):
        stream = tiny.stream(sizes, per_class=6)
        model = tiny.model(configured(tiny, name, network, train={"epochs": 1}), stream)
        seen = model.method.stream(stream)
        for task in seen:
            model.method.learn(task)
            before = {key: value.clone() for key, value in kept(model).items()}
            first, second = (
                evaluate(model.method.predict, seen[: task.index + 1], model.method.context) for _ in range(2)
            )
            assert first == second
            same_bits(kept(model), before)


@every_method
def test_global_randomness_is_left_as_it_was(name: str, tiny) -> None:
    stream = tiny.stream((2, 1, 2), per_class=6)
    model = tiny.model(configured(tiny, name, train={"epochs": 1}), stream)
    for task in model.method.stream(stream):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        model.method.learn(task)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert random.getstate() == before[2]


@every_method
def test_a_backbone_is_taken_or_refused_before_any_work(name: str, tiny, tmp_path: Path) -> None:
    method, options = name.partition(" ")[0], VARIANTS.get(name, {})
    kind = methods.find(method)
    options |= kind.options_for_any_backbone
    check({"method": method, "options": options})
    network = tiny.net("resnet_test").backbone
    if not kind.needs_vit:
        methods.build(method, options).check(network)
    if kind.options_for_any_backbone or kind.needs_vit:  # else the defaults suit every backbone
        with pytest.raises(CofimaError, match="ResNet"):
            methods.build(method).check(network)


@every_method
def test_options_survive_json_and_are_complete(name: str) -> None:
    name, given = name.partition(" ")[0], VARIANTS.get(name, {})
    method = methods.build(name, given)
    options = methods.options_of(method)
    assert set(options) == {field.name for field in fields(method)}
    again = methods.build(name, json.loads(json.dumps(options)))
    assert methods.options_of(again) == options
    assert check({"method": name, "options": options}).options == options


@every_method
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(CofimaError, match=r"options\.no_such_option"):
        check({"method": name.partition(" ")[0], "options": {"no_such_option": 1}})


@every_method
def test_a_loaded_model_is_the_model(name: str, tiny, tmp_path: Path, same_bits) -> None:
    """A model read from disk predicts the same, and learns the next task the same."""
    stream = tiny.stream((2, 2, 2), per_class=6)
    config = configured(tiny, name, train={"epochs": 1})
    model = tiny.model(config, stream)
    tasks = model.method.stream(stream)
    for task in tasks[: max(1, len(tasks) - 1)]:
        model.method.learn(task)
        model.tasks.append(task.names)
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    images = stream[0].test.batch(torch.arange(5))[0]
    assert torch.equal(again.logits(images), model.logits(images))
    same_bits(kept(again), kept(model))
    if len(tasks) > 1:
        for one in (model, again):
            one.method.learn(tasks[-1])
        same_bits(kept(again), kept(model))
        assert torch.equal(again.logits(images), model.logits(images))


@every_method
def test_the_history_of_a_task_is_complete_and_json(name: str, tiny, tmp_path: Path) -> None:
    model = tiny.run(tmp_path, configured(tiny, name, train={"epochs": 1}), tiny.stream((2, 1), per_class=6))
    for row in model.history:
        assert parse_rows(dump_rows([row]), "history.jsonl") == [row]
        json.dumps(row.model_dump(mode="json"), allow_nan=False)
        assert {"total", "evaluate"} <= row.seconds.keys()
        assert row.distance.from_start >= 0
        assert row.state_bytes == sum(
            v.numel() * v.element_size() for v in model.method.state().values()
        ) or row.task < len(model.history)


def test_unknown_methods_get_a_hint() -> None:
    with pytest.raises(CofimaError, match="did you mean 'coma'"):
        methods.find("comma")
    assert methods.names() == sorted(methods.names())
    assert {"seq_ft", "joint", "slca", "coma", "cofima"} <= set(methods.names())
    assert "base" not in methods.names()
