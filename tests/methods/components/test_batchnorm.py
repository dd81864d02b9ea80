"""Batch normalization after a merge: statistics of the merged network, nothing else touched."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cofima.methods.components import averaging
from cofima.methods.components.batchnorm import refresh_batchnorm
from cofima.weights import average, snapshot


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
    )
    made[1].running_mean.fill_(7.0)
    made[1].num_batches_tracked.fill_(12)
    return made.train()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, 6, 6, generator=g), torch.zeros(5)) for _ in range(count)]


def test_statistics_become_the_mean_over_the_batches(net: nn.Module) -> None:
    assert refresh_batchnorm(net, batches())
    activations = [net[0](x) for x, _ in batches()]
    mean = torch.stack([a.mean((0, 2, 3)) for a in activations]).mean(0)
    variance = torch.stack([a.var((0, 2, 3), unbiased=True) for a in activations]).mean(0)
    torch.testing.assert_close(net[1].running_mean, mean)
    torch.testing.assert_close(net[1].running_var, variance)


def test_nothing_but_the_statistics_changes(net: nn.Module, same_bits) -> None:
    before = copy.deepcopy(net.state_dict())
    refresh_batchnorm(net, batches())
    after = net.state_dict()
    for key in ("1.running_mean", "1.running_var"):
        assert not torch.equal(before.pop(key), after.pop(key))
    same_bits(after, before)  # the integer counter included
    assert net[1].momentum == 0.3
    assert not any(m.training for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_the_result_does_not_depend_on_what_was_there_before(net: nn.Module, same_bits) -> None:
    twin = copy.deepcopy(net)
    twin[1].running_mean.fill_(float("inf"))
    refresh_batchnorm(net, batches())
    refresh_batchnorm(twin, batches())
    same_bits(net.state_dict(), twin.state_dict())


def test_a_network_without_batchnorm_is_not_run() -> None:
    def never():
        raise AssertionError("read")
        yield

    assert not refresh_batchnorm(nn.Linear(2, 2), never())
    frozen = nn.BatchNorm1d(2, track_running_stats=False)
    assert not refresh_batchnorm(frozen, never())


def test_no_batches_leave_a_usable_network(net: nn.Module) -> None:
    refresh_batchnorm(net, [])
    assert torch.isfinite(net(batches()[0][0])).all()


@pytest.mark.parametrize(
    ("name", "refreshed"), [("ema", False), ("wise_ft", False), ("weight_ensemble", False), ("coma", True)]
)
def test_averages_of_the_backbone_alone_leave_a_backbone_that_did_not_move(
    name: str, refreshed: bool, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training at rate 0 moves the running statistics alone: they are averaged, not estimated anew."""
    calls = []
    real = averaging.refresh_batchnorm
    monkeypatch.setattr(averaging, "refresh_batchnorm", lambda *a: (calls.append(1), real(*a))[1])
    stream = tiny.stream((2, 2))
    config = tiny.config(name, "resnet_test", train={"epochs": 2, "backbone_lr_scale": 0})
    method = tiny.model(config, stream).method
    start, trained = snapshot(method.net.backbone), []
    for task in stream:
        previous = snapshot(method.net.backbone)
        method.learn(
            task,
            train=lambda task: (method.train(task), trained.append(snapshot(method.net.backbone))),
        )
    assert bool(calls) == refreshed
    other = {"wise_ft": start, "weight_ensemble": previous}.get(name)
    if other is not None:
        expected = average(other, trained[-1], 0.5)
        now = method.net.backbone.state_dict()
        assert all(torch.equal(now[key], value) for key, value in expected.items())
        assert not torch.equal(now["bn1.running_mean"], trained[-1]["bn1.running_mean"])
