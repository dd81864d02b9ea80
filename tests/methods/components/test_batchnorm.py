"""Batch normalisation after a merge: statistics of the merged network, nothing else touched."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cofima.methods.components.batchnorm import refresh_batchnorm


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
