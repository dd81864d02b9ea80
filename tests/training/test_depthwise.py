"""Gradients of depthwise convolutions: those of PyTorch, whatever stride, padding and dilation."""

import pytest
import timm
import torch
from torch.nn import functional

from cofima.training import depthwise
from cofima.training.depthwise import Depthwise, faster_gradients

SHAPES = [
    # size of the input, kernel, stride, padding, dilation
    ((4, 4), (5, 5), (1, 1), (2, 2), (1, 1)),
    ((2, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((7, 7), (5, 5), (2, 2), (0, 0), (1, 1)),
    ((2, 2), (7, 7), (1, 1), (3, 3), (1, 1)),  # places of the kernel that meet padding alone
    ((6, 3), (3, 5), (2, 1), (1, 2), (1, 1)),
    ((5, 8), (3, 3), (3, 2), (2, 4), (2, 3)),
]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_the_gradients_are_those_of_the_convolution(case: tuple[tuple[int, int], ...], bias: bool) -> None:
    size, kernel, *how = case
    draw = torch.Generator().manual_seed(1)
    given = torch.randn(3, 6, *size, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 1, *kernel, generator=draw, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [given, weight, *([offset] if offset is not None else [])]
    stock = functional.conv2d(given, weight, offset, *how, 6)
    mine = Depthwise.apply(given, weight, offset, *how)
    assert torch.equal(mine, stock)
    towards = torch.randn(stock.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(stock, inputs, towards)
    torch.testing.assert_close(torch.autograd.grad(mine, inputs, towards), expected, rtol=1e-12, atol=1e-12)


def test_a_network_in_the_context_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real network whose layers pad by themselves; the faster way is taken where kernels are larger."""
    net = timm.create_model("tf_efficientnet_lite0", num_classes=3).eval()
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    taken: list[tuple[int, ...]] = []
    really = depthwise.weight_gradient

    def counted(given: torch.Tensor, grad: torch.Tensor, *rest: object) -> torch.Tensor:
        taken.append(tuple(grad.shape[2:]))
        return really(given, grad, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(depthwise, "weight_gradient", counted)
    gradients = []
    for context in (faster_gradients(torch.nn.Linear(1, 1)), faster_gradients(net)):
        with context:
            value = net(images).square().sum()
        gradients.append(torch.autograd.grad(value, list(net.parameters())))
    assert sorted(set(taken)) == [(2, 2), (4, 4)]
    assert len(taken) == 8
    for expected, found in zip(*gradients, strict=True):
        assert (expected - found).norm() <= 1e-4 * expected.norm() + 1e-7


def test_autocast_and_a_frozen_weight_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> torch.Tensor:
        raise AssertionError("the faster way")

    layer = torch.nn.Conv2d(6, 6, 5, padding=2, groups=6)
    context = faster_gradients(layer)
    monkeypatch.setattr(depthwise, "weight_gradient", never)
    images = torch.randn(2, 6, 3, 3, requires_grad=True)
    with context, torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(layer(images).float().sum())
    layer.weight.requires_grad_(False)
    with context:
        torch.autograd.backward(layer(images).sum())
