"""Weight ensemble: the mean of all tasks' weights, each trained from the start or from the mean so far."""

from pathlib import Path

import pytest
import torch

from cofima.methods.components.aligned import Aligned
from cofima.weights import snapshot

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
inits = pytest.mark.parametrize("init", ["pretrained", "previous"])


def made(tiny, method="weight_ensemble", network="vit_test", sizes=(2, 1, 2, 2), **options):
    stream = tiny.stream(sizes, per_class=8)
    return tiny.model(tiny.config(method, network, train={"epochs": 2}, options=options), stream), stream


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list that fills with the weights right before and right after each training."""
    found: list = []
    train = Aligned.train

    def spied(self, task, hooks):
        before = snapshot(self.net)
        train(self, task, hooks)
        found.append((before, snapshot(self.net)))

    monkeypatch.setattr(Aligned, "train", spied)
    return found


def without_statistics(weights):
    """Leave out what batch normalization estimates anew, and its counters."""
    return {k: v for k, v in weights.items() if "running" not in k and "tracked" not in k}


@both
@inits
def test_the_backbone_is_the_mean_of_all_tasks(init: str, network: str, tiny, trained: list) -> None:
    model, stream = made(tiny, network=network, init=init)
    for task in stream:
        model.method.learn(task)
        for key, value in without_statistics(model.method.net.backbone.state_dict()).items():
            every = torch.stack([after[f"backbone.{key}"].double() for _, after in trained])
            torch.testing.assert_close(value.double(), every.mean(0), rtol=1e-5, atol=1e-7)
        assert model.method.facts["lam"] == (None if task.index == 0 else 1 / (task.index + 1))


@inits
def test_the_running_mean_is_exact_in_float64(init: str, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """On scripted weights, so that nothing but the mean itself is computed."""
    model, stream = made(tiny, init=init, sizes=(2, 2, 2, 2, 2))
    method = model.method
    method.net.double()
    script = torch.Generator().manual_seed(1)
    seen: list = []

    def train(self, task, hooks):
        for value in self.net.backbone.state_dict().values():
            value.copy_(torch.randn(value.shape, generator=script, dtype=torch.float64))
        seen.append(snapshot(self.net.backbone))

    monkeypatch.setattr(Aligned, "train", train)
    monkeypatch.setattr(Aligned, "remember", lambda *_: None)
    monkeypatch.setattr(Aligned, "align_head", lambda *_: None)
    for task in stream:
        method.learn(task)
        for key, value in method.net.backbone.state_dict().items():
            mean = torch.stack([weights[key] for weights in seen]).mean(0)
            torch.testing.assert_close(value, mean, rtol=0, atol=1e-14)


@both
def test_from_the_mean_so_far_it_is_coma_with_one_over_t(network: str, tiny, same_bits) -> None:
    ours, stream = made(tiny, network=network, init="previous")
    coma, _ = made(tiny, "coma", network)
    for task in stream:
        coma.method.lam = 1 / (task.index + 1)
        for model in (ours, coma):
            model.method.learn(task)
        same_bits(ours.method.net.state_dict(), coma.method.net.state_dict())
        same_bits(ours.method.head().state_dict(), coma.method.head().state_dict())
        same_bits(ours.method.state(), coma.method.state())


@both
def test_every_task_starts_from_the_pretrained_weights(network: str, tiny, trained: list, same_bits) -> None:
    model, stream = made(tiny, network=network, init="pretrained")
    start = snapshot(model.method.net.backbone)
    for task in stream:
        model.method.learn(task)
        before, _ = trained[-1]
        same_bits({k: before[f"backbone.{k}"] for k in start}, start)


@both
def test_every_task_starts_from_the_mean_so_far(network: str, tiny, trained: list, same_bits) -> None:
    model, stream = made(tiny, network=network, init="previous")
    for task in stream:
        mean = snapshot(model.method.net.backbone)
        model.method.learn(task)
        before, _ = trained[-1]
        same_bits({k: before[f"backbone.{k}"] for k in mean}, mean)


@inits
def test_rows_of_the_head_are_those_of_their_own_task(init: str, tiny, trained: list) -> None:
    model, stream = made(tiny, init=init)
    for task in stream:
        model.method.learn(task)
    for index, (_, after) in enumerate(trained):
        key = f"head.blocks.{index}.weight"
        assert torch.equal(model.method.net.state_dict()[key], after[key])


def test_the_state_does_not_grow_with_tasks_but_for_classes(tiny) -> None:
    model, stream = made(tiny, init="pretrained")
    start = snapshot(model.method.net.backbone)
    for task in stream:
        model.method.learn(task)
        state = model.method.state()
        kept = {k.removeprefix("start."): v for k, v in state.items() if k.startswith("start.")}
        assert kept.keys() == start.keys()
        assert all(torch.equal(kept[k], start[k]) for k in start)
        assert not hasattr(model.method, "mean")
    model, stream = made(tiny, init="previous")
    model.method.learn(stream[0])
    assert not any(key.startswith("start.") for key in model.method.state())


@inits
def test_the_history_tells_how_far_training_went(init: str, tiny, tmp_path: Path) -> None:
    config = tiny.config("weight_ensemble", train={"epochs": 2}, options={"init": init})
    history = tiny.run(tmp_path, config, tiny.stream((2, 2, 2))).history
    for row in history[1:]:
        assert row.distance.trained > 0
        law = row.distance.trained / row.task
        assert row.distance.merged == pytest.approx(law, rel=1e-4)
