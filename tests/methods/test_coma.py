"""CoMA: the limits, the average itself, batch normalization, and lam = auto."""

import copy
from pathlib import Path

import pytest
import torch

from cofima.core.errors import CofimaWarning
from cofima.methods import coma as module
from cofima.methods.coma import CoMA
from cofima.methods.components import averaging
from cofima.weights import auto_lambda, average, snapshot, weight_distance

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def made(tiny, method="coma", network="vit_test", sizes=(2, 1, 2), train=None, **options):
    stream = tiny.stream(sizes, per_class=8)
    model = tiny.model(
        tiny.config(method, network, train={"epochs": 2} | (train or {}), options=options), stream
    )
    return model.method, stream


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list that fills with the weights right after each training, before any merge."""
    found: list = []
    train = CoMA.train

    def spied(self, task, hooks):
        train(self, task, hooks)
        found.append(snapshot(self.net))

    monkeypatch.setattr(CoMA, "train", spied)
    return found


@both
def test_all_new_is_slca(network: str, tiny, same_bits) -> None:
    a, stream = made(tiny, "coma", network, lam=1.0)
    b, _ = made(tiny, "slca", network)
    for task in stream:
        a.learn(task)
        b.learn(task)
        same_bits(a.net.state_dict(), b.net.state_dict())
        same_bits(a.head().state_dict(), b.head().state_dict())
        same_bits(a.state(), b.state())


@both
def test_none_new_keeps_the_first_backbone(network: str, tiny, same_bits) -> None:
    method, stream = made(tiny, "coma", network, lam=0.0)
    method.learn(stream[0])
    first = copy.deepcopy(method.net.backbone.state_dict())
    for task in stream[1:]:
        method.learn(task)
        now = method.net.backbone.state_dict()
        whole = {k for k, v in now.items() if not v.is_floating_point()}  # integer counters come from the new
        assert whole == {k for k in now if "num_batches_tracked" in k}
        same_bits({k: now[k] for k in now.keys() - whole}, {k: first[k] for k in now.keys() - whole})
        assert all(int(now[k]) > int(first[k]) for k in whole)


@both
def test_each_merge_is_eq_3_and_new_rows_are_as_trained(network: str, tiny, trained: list, same_bits) -> None:
    method, stream = made(tiny, "coma", network, lam=0.3)
    before = None
    for task in stream:
        method.learn(task)
        now, new = snapshot(method.net), trained[-1]
        if before is None:
            same_bits(now, new)
        else:
            expected = average(before, new, 0.3)
            statistics = {k for k in now if "running" in k}  # estimated anew
            assert bool(statistics) == (network == "resnet_test")
            same_bits(
                {k: now[k] for k in now.keys() - statistics},
                {k: expected[k] for k in now.keys() - statistics},
            )
            for key in ("weight", "bias"):
                block = f"head.blocks.{task.index}.{key}"
                assert torch.equal(now[block], new[block])
                assert torch.equal(now[f"head.blocks.0.{key}"], trained[0][f"head.blocks.0.{key}"])
            assert method.facts["lam"] == 0.3
        before = now


@both
def test_the_history_keeps_the_law_of_distances(network: str, tiny, tmp_path: Path) -> None:
    config = tiny.config("coma", network, train={"epochs": 2}, options={"lam": 0.25})
    model = tiny.run(tmp_path, config, tiny.stream((2, 1, 2)))
    for row in model.history[1:]:
        assert row.distance.trained > 0
        assert row.distance.merged == pytest.approx(0.25 * row.distance.trained, rel=1e-4)


@pytest.mark.parametrize(("lam", "times"), [(0.0, 0), (0.5, 2), (1.0, 0)])
def test_batch_statistics_are_refreshed_only_between_the_endpoints(
    lam: float, times: int, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = averaging.refresh_batchnorm
    monkeypatch.setattr(averaging, "refresh_batchnorm", lambda *a: (calls.append(1), real(*a))[1])
    method, stream = made(tiny, "coma", "resnet_test", lam=lam)
    for task in stream:
        method.learn(task)
    assert len(calls) == times


def test_refreshed_statistics_are_of_the_merged_network_on_this_task(tiny) -> None:
    method, stream = made(tiny, "coma", "resnet_test", sizes=(2, 2), train={"batch_size": 64}, lam=0.5)
    for task in stream:
        method.learn(task)
    seen = []
    hook = method.net.backbone.bn1.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    images = method.context.view.test(stream[1].train.batch(torch.arange(len(stream[1].train)))[0])
    with torch.no_grad():
        method.net(images)
    hook.remove()
    torch.testing.assert_close(method.net.backbone.bn1.running_mean, seen[0].mean((0, 2, 3)))
    torch.testing.assert_close(method.net.backbone.bn1.running_var, seen[0].var((0, 2, 3)))


@pytest.mark.parametrize("statistics", ["merged", "trained"])
def test_gaussians_are_of_the_merged_or_of_the_trained_weights(statistics: str, tiny, trained: list) -> None:
    method, stream = made(tiny, sizes=(2, 2), lam=0.5, statistics=statistics)
    for task in stream:
        method.learn(task)
    net = copy.deepcopy(method.net)
    if statistics == "trained":
        net.load_state_dict(trained[1])
    images = method.context.view.test(stream[1].train.batch(torch.arange(len(stream[1].train)))[0])
    with torch.inference_mode():
        features = net.eval().features(images)
    mean = features[stream[1].train.labels == 3].double().mean(0).float()
    torch.testing.assert_close(method.gaussians.means[3], mean, rtol=1e-5, atol=1e-6)
    other = trained[1] if statistics == "merged" else snapshot(method.net)
    net.load_state_dict(other)
    with torch.inference_mode():
        features = net.features(images)
    assert not torch.allclose(
        method.gaussians.means[3], features[stream[1].train.labels == 3].mean(0), atol=1e-4
    )


def test_no_fisher_is_computed_unless_auto_asks_for_it(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "task_fisher", lambda *_: pytest.fail("computed"))
    method, stream = made(tiny)
    for task in stream:
        method.learn(task)
    assert not any(key.startswith("fisher") for key in method.state())


def test_the_copy_of_the_old_weights_is_let_go(tiny) -> None:
    method, stream = made(tiny)
    for task in stream:
        method.learn(task)
        assert not hasattr(method, "old")


# --- lam = auto ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["classes", "samples", "tasks"])
def test_auto_takes_the_minimum_of_the_sums_so_far(
    weight: str, tiny, trained: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    fishers = []
    real = module.task_fisher
    monkeypatch.setattr(module, "task_fisher", lambda *a: fishers.append(real(*a)) or fishers[-1])
    method, stream = made(tiny, sizes=(2, 3, 1), lam="auto", weight=weight)
    before, total = None, {}
    for task in stream:
        method.learn(task)
        counts = {"classes": len(task.classes), "samples": len(task.train), "tasks": 1}[weight]
        mine = {k: f * counts for k, f in fishers[-1].items()}
        if before is not None:
            lam = auto_lambda(before, trained[-1], total, mine)
            assert method.facts["lam"] == pytest.approx(lam, rel=1e-6)
            assert 0 < lam < 1
            moved = weight_distance(snapshot(method.net), before)
            assert moved == pytest.approx(lam * weight_distance(trained[-1], before), rel=1e-4)
        total = {k: f + total.get(k, 0) for k, f in mine.items()}
        before = snapshot(method.net)
        for key, value in total.items():
            torch.testing.assert_close(method.state()[f"fisher.{key}"], value)
    assert len(fishers) == 3


def test_auto_of_equal_tasks_is_the_mean(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "task_fisher", lambda net, *_: {k: torch.ones_like(p) for k, p in net.named_parameters()}
    )
    method, stream = made(tiny, sizes=(2, 2, 2), lam="auto")
    shares = []
    for task in stream:
        method.learn(task)
        shares.append(method.facts["lam"])
    assert shares == [None, pytest.approx(1 / 2), pytest.approx(1 / 3)]


def test_auto_falls_back_aloud_when_nothing_moved(tiny) -> None:
    method, stream = made(tiny, sizes=(2, 2), train={"backbone_lr_scale": 0}, lam="auto", fallback=0.7)
    method.learn(stream[0])
    with pytest.warns(CofimaWarning, match="lam=auto is undefined"):
        method.learn(stream[1])
    assert method.facts["lam"] == 0.7
