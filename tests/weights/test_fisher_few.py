"""Few samples: computed one by one, whatever the process did before; their features pass in one batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cofima.methods.components.fisher import PassingFeatures
from cofima.models.net import Net
from cofima.weights.fisher import diagonal
from cofima.weights.fisher.diagonal import FEW, LabeledBatches, diagonal_fisher


def network() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return Net(body, 6, [3]).eval()


def batches(*sizes: int) -> LabeledBatches:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 8, 8, generator=g), torch.randint(3, (size,), generator=g)) for size in sizes
    ]


def one_by_one(net: nn.Module, given: LabeledBatches) -> dict[str, Tensor]:
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    count = 0
    for images, labels in given:
        for image, label in zip(images, labels, strict=True):
            net.zero_grad()
            cross_entropy(net(image[None]), label[None]).backward()
            for name, p in net.named_parameters():
                sums[name] += p.grad.square()
            count += 1
    return {name: total / count for name, total in sums.items()}


def seen_by(net: Net, given: LabeledBatches) -> list[int]:
    """Return the sizes of the batches that the network sees while its Fisher information is computed."""
    sizes: list[int] = []
    hook = net.backbone.register_forward_hook(lambda _, __, out: sizes.append(len(out)))
    diagonal_fisher(net, given)
    hook.remove()
    return sizes


def test_a_new_network_is_not_verified_for_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("verified")

    monkeypatch.setattr(diagonal, "verified", refuse)
    assert seen_by(network(), batches(FEW)) == [1] * FEW
    with pytest.raises(AssertionError, match="verified"):
        diagonal_fisher(network(), batches(FEW + 1))


def test_later_batches_take_the_rules_however_small() -> None:
    net = network()
    seen_by(net, batches(FEW + 1))  # verified from here on
    assert seen_by(net, batches(3, 4, 2)) == [1, 1, 1, 4, 2]
    assert seen_by(net, batches(FEW + 1, 2)) == [FEW + 1, 2]


@pytest.mark.parametrize("sizes", [(1,), (2,), (FEW,), (3, 5), (FEW, FEW + 4)])
def test_the_result_is_that_of_one_sample_at_a_time(sizes: tuple[int, ...]) -> None:
    net, given = network().double(), [(x.double(), y) for x, y in batches(*sizes)]
    expected = one_by_one(net, given)
    for name, values in diagonal_fisher(net, given).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(2,), (FEW,), (FEW + 1,), (3, 5)])
def test_no_bit_depends_on_what_was_verified_before(
    sizes: tuple[int, ...], same_bits: Callable[..., None]
) -> None:
    known, given = network(), batches(*sizes)
    diagonal_fisher(known, batches(12))
    same_bits(diagonal_fisher(known, given), diagonal_fisher(network(), given))


@pytest.mark.parametrize("sizes", [(1,), (FEW,), (4, 4, 1), (12, 12)])
def test_features_that_pass_are_those_of_whole_batches(sizes: tuple[int, ...]) -> None:
    net, given, passing = network(), batches(*sizes), PassingFeatures()
    diagonal_fisher(net, passing.watch(net, given))
    with torch.inference_mode():
        expected = torch.cat([net.features(images) for images, _ in given])
    found = passing.all(sum(sizes))
    assert found is not None
    assert torch.equal(found, expected)
    assert not found.requires_grad
