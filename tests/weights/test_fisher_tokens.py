"""Fisher information of models that read tokens: inputs by name, tables of words, labels for every token."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

from cofima.core.errors import CofimaError
from cofima.weights.fisher import diagonal
from cofima.weights.fisher.diagonal import diagonal_fisher

WORDS, WIDTH, CLASSES = 9, 6, 3


@pytest.fixture(autouse=True)
def _rules_for_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute batches of few samples by the rules, too: these are what is tested here."""
    monkeypatch.setattr(diagonal, "FEW", 1)


class ScaledNorm(nn.Module):
    """Root-mean-square normalization as language models write it out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Reader(nn.Module):
    """Words, types and positions, attention, a turned layer and norms, to logits of texts or of tokens."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.tokens = tokens
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.types = nn.Embedding(2, WIDTH)
        self.places = nn.Embedding(8, WIDTH)
        self.norm, self.query, self.key = ScaledNorm(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turned, self.shift = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.scale, self.out = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids, mask = inputs["ids"], inputs["mask"]
        types = self.types((ids % 2).long())
        x = self.norm(self.words(ids) + types + self.places(torch.arange(ids.shape[1])[None]))
        keys = self.key(x)  # whose bias has gradients of rounding errors alone
        x = nn.functional.scaled_dot_product_attention(self.query(x), keys, x, attn_mask=mask[:, None, :])
        x = torch.addmm(self.shift, x.view(-1, WIDTH), self.turned).view(x.shape)
        x = rms_norm(x, [WIDTH], self.scale)
        result: Tensor = self.out(x if self.tokens else x[:, 0])
        return result


def reader(tokens: bool) -> nn.Module:
    torch.manual_seed(0)
    return Reader(tokens).double()


def texts() -> dict[str, Tensor]:
    ids = torch.tensor([[1, 2, 2, 0], [4, 4, 4, 5], [6, 1, 0, 0], [7, 8, 2, 1], [3, 3, 1, 2]])
    return {"ids": ids, "mask": ids > 0}


def one_by_one(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """Return the mean squared gradient of each text's log-likelihood, by the obvious loop."""
    parameters = dict(model.named_parameters())
    sums = {key: torch.zeros_like(p) for key, p in parameters.items()}
    for i in range(len(labels)):
        logits = model({key: value[i : i + 1] for key, value in inputs.items()})
        loss = cross_entropy(logits.view(-1, CLASSES), labels[i : i + 1].view(-1), reduction="sum")
        for key, grad in zip(sums, torch.autograd.grad(loss, [*parameters.values()]), strict=True):
            sums[key] += grad.square()
    return {key: value / len(labels) for key, value in sums.items()}


@pytest.mark.parametrize("tokens", [False, True])
def test_equals_the_loop_and_no_parameter_is_left_to_the_slow_way(
    tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: list[Any] = []
    monkeypatch.setattr(diagonal, "add_each", lambda *a: slow.append(a))
    model, inputs = reader(tokens), texts()
    labels = torch.where(inputs["ids"] > 0, inputs["ids"] % 3, -100) if tokens else torch.arange(5) % 3
    found = diagonal_fisher(model, [(inputs, labels)])
    assert slow == []
    for key, value in one_by_one(model, inputs, labels).items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-9, atol=1e-15, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.parametrize("strange", ["twice", "repeated", "padded", "max_norm"])
def test_tables_that_the_rule_does_not_cover_are_exact_too(strange: str) -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            most = 1.0 if strange == "max_norm" else None
            self.places = nn.Embedding(
                4, WIDTH, padding_idx=1 if strange == "padded" else None, max_norm=most
            )
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            index = torch.tensor([[0, 0, 3] if strange == "repeated" else [0, 1, 3]])
            rows = self.places(index)
            both = x + rows + (torch.tanh(rows) if strange == "twice" else 0)
            result: Tensor = self.out(torch.tanh(both).sum(1))
            return result

    torch.manual_seed(0)
    model, x, y = Strange().double(), torch.randn(4, 3, WIDTH).double(), torch.arange(4) % 3
    model(x)  # max_norm scales rows once
    found = diagonal_fisher(model, [(x, y)])
    parameters = dict(model.named_parameters())
    expected = {key: torch.zeros_like(p) for key, p in parameters.items()}
    for i in range(4):
        loss = cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        for key, grad in zip(expected, torch.autograd.grad(loss, [*parameters.values()]), strict=True):
            expected[key] += grad.square() / 4
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-15)


def test_sampled_labels_leave_tokens_without_a_label_out() -> None:
    model, inputs = reader(True), texts()
    labels = torch.full_like(inputs["ids"], -100)
    labels[:, 0] = 0
    found = diagonal_fisher(model, [(inputs, labels)], "sampled")
    draws = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:, 0]
    p = model(inputs)[:, 0].softmax(-1)
    drawn = labels.clone()
    drawn[:, 0] = (p.cumsum(-1) <= draws[:, None]).sum(-1)
    for key, value in one_by_one(model, inputs, drawn).items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-15)


def test_what_does_not_fit_is_named() -> None:
    model, inputs = reader(True), texts()
    with pytest.raises(CofimaError, match=r"logits of shape \(1, classes\), got \(1, 4, 3\)"):
        diagonal_fisher(model, [(inputs, torch.arange(5) % 3)])
    with pytest.raises(CofimaError, match="'exact': not for models with several labels"):
        diagonal_fisher(model, [(inputs, inputs["ids"] % 3)], "exact")
    with pytest.raises(CofimaError, match="one integer class id"):
        diagonal_fisher(model, [(inputs, torch.arange(4))])
