"""Fisher information of few samples, which torch vectorizes: equal to the obvious loop, or left to others."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cofima.core.errors import CofimaError
from cofima.weights.fisher import diagonal, few
from cofima.weights.fisher.diagonal import Weights, diagonal_fisher

CLASSES = 4


class Choosing(nn.Module):
    """Looks at a value on its way, which torch cannot vectorize."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x.flatten(1)))
        assert float(y.abs().max()) <= 1
        return self.last(y)


class Tied(nn.Module):
    """Uses one weight twice, which the fast rules leave to the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x.flatten(1))))))


def network(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if name in ("choosing", "tied"):
            return (Choosing() if name == "choosing" else Tied()).double()
        small = {"img_size": 32, "depth": 2} if name.startswith("vit") else {}
        return timm.create_model(name, num_classes=CLASSES, **small).double()


def data(name: str, count: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    side = 2 if name in ("choosing", "tied") else 32
    images = torch.randn(count, 3, side, side, generator=g, dtype=torch.float64)
    return images, torch.randint(CLASSES, (count,), generator=g)


def one_by_one(model: nn.Module, images: Tensor, targets: Tensor) -> Weights:
    sums = {key: torch.zeros_like(p) for key, p in model.eval().named_parameters()}
    for x, y in zip(images, targets, strict=True):
        model.zero_grad()
        cross_entropy(model(x[None]), y[None]).backward()
        for key, p in model.named_parameters():
            sums[key] += p.grad.square() / len(images)
    model.zero_grad()
    return sums


@pytest.fixture
def vectorized(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that fills with whether each first batch of few samples was vectorized."""
    found: list[bool] = []
    real = few.add_few

    def spied(*args: Any) -> bool:
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(diagonal, "add_few", spied)
    return found


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "tied", "choosing"])
def test_it_equals_the_loop(name: str, vectorized: list[bool]) -> None:
    net, (images, targets) = network(name), data(name)
    found = diagonal_fisher(net, [(images, targets)])
    assert vectorized == [name != "choosing"]
    for key, expected in one_by_one(net, images, targets).items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(found[key], expected, rtol=1e-8, atol=1e-8 * scale, msg=key)


@pytest.mark.parametrize("options", [{"columns": slice(1, 4)}, {"labels": "sampled"}, {"labels": "exact"}])
def test_it_equals_the_rules(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net, (images, targets) = network("tied"), data("tied")
    targets = targets.clamp(min=1)
    found = diagonal_fisher(net, [(images, targets)], **options)
    monkeypatch.setattr(diagonal, "FEW", 0)
    for key, expected in diagonal_fisher(net, [(images, targets)], **options).items():
        torch.testing.assert_close(found[key], expected, rtol=1e-8, atol=1e-12, msg=key)


def test_bits_do_not_depend_on_what_was_verified_before(vectorized: list[bool]) -> None:
    net, (images, targets) = network("resnet18"), data("resnet18", count=20)
    few = (images[:6], targets[:6])
    first = diagonal_fisher(net, [few])
    diagonal_fisher(net, [(images, targets)])  # verifies the network
    again = diagonal_fisher(net, [few])
    assert vectorized == [True, True]
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_only_a_first_batch_is_vectorized(vectorized: list[bool]) -> None:
    net, (images, targets) = network("tied"), data("tied", count=9)
    found = diagonal_fisher(net, [(images[i : i + 3], targets[i : i + 3]) for i in (0, 3, 6)])
    assert vectorized == [True]
    for key, expected in one_by_one(net, images, targets).items():
        torch.testing.assert_close(found[key], expected, rtol=1e-8, atol=1e-12, msg=key)


def test_hooks_see_real_tensors(vectorized: list[bool]) -> None:
    net, (images, targets) = network("tied"), data("tied")
    seen: list[Tensor] = []
    net.layer.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    diagonal_fisher(net, [(images, targets)])
    assert vectorized == [False]
    assert all(bool(torch.isfinite(out).all()) for out in seen)
    assert seen


def test_what_is_wrong_is_said_as_ever() -> None:
    net, (images, targets) = network("tied"), data("tied")
    with pytest.raises(CofimaError, match="7: not a class; the logits cover 0 to 3"):
        diagonal_fisher(net, [(images, targets.clone().fill_(7))])
    with pytest.raises(CofimaError, match="the logits are not finite"):
        diagonal_fisher(net, [(images * torch.nan, targets)])
