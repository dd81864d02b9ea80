"""Continual averaging in a plain loop: equations, state, and refused inputs."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cofima
from cofima import ContinualAverage
from cofima.core.errors import CofimaError
from cofima.methods.components.fisher import AverageFisherOptions
from cofima.weights.ops import snapshot

Batches = list[tuple[Tensor, Tensor]]
WIDTH = 4


def batches(first: int, classes: int = 2, seed: int = 0, count: int = 12) -> Batches:
    """Return two batches of vectors with labels from ``first`` on."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=chance, dtype=torch.float64)
    y = first + torch.arange(count) % classes
    x[torch.arange(count), y % WIDTH] += 2
    return [(x[: count // 2], y[: count // 2]), (x[count // 2 :], y[count // 2 :])]


def network(classes: int = 2, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(5)
    middle: nn.Module = nn.BatchNorm1d(6) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(WIDTH, 6), middle, nn.Linear(6, classes)).double()


def train(model: nn.Module, loader: Batches, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(steps):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(x), y))
            optimizer.step()


def grow(model: nn.Sequential, classes: int) -> None:
    """Give the last layer rows for more classes."""
    torch.manual_seed(1)
    old, new = model[2], nn.Linear(6, classes).double()
    with torch.no_grad():
        new.weight[: len(old.weight)] = old.weight
        new.bias[: len(old.bias)] = old.bias
    model[2] = new


def learn_two(model: nn.Sequential, merger: ContinualAverage) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Learn two tasks by the same classes; return the weights before and after the second's training."""
    with merger.task(one := batches(0)):
        train(model, one)
    before = snapshot(model)
    two = batches(0, seed=1)
    merger.begin()
    train(model, two)
    trained = snapshot(model)
    merger.end(two)
    return before, trained


def test_without_fisher_it_is_the_plain_average(same_bits: Callable[..., None]) -> None:
    model = network()
    before, trained = learn_two(model, ContinualAverage(model, lam=0.3, fisher=None))
    same_bits(snapshot(model), cofima.average(before, trained, 0.3))


@pytest.mark.parametrize("how", ["data", "exact"])
def test_with_fisher_it_is_the_weighted_average(how: Any, same_bits: Callable[..., None]) -> None:
    model, twin = network(), network()
    before, trained = learn_two(model, ContinualAverage(model, lam=0.3, fisher=how))
    fishers = []
    for weights, seed in ((before, 0), (trained, 1)):
        twin.load_state_dict(weights)
        fishers.append(cofima.diagonal_fisher(twin, batches(0, seed=seed), how))
    same_bits(snapshot(model), cofima.fisher_average(before, trained, *fishers, 0.3))


def test_the_next_task_weighs_the_average_by_its_own_fisher() -> None:
    model = network()
    merger = ContinualAverage(model)
    learn_two(model, merger)
    expected = cofima.diagonal_fisher(model, batches(0, seed=1))
    assert all(torch.equal(value, expected[key]) for key, value in merger.old_fisher.items())


def test_equal_fisher_information_is_the_plain_average(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(model: nn.Module, pairs: Iterator[Any], *_: Any, **__: Any) -> dict[str, Tensor]:
        assert [*pairs]
        return {key: torch.ones_like(p) for key, p in model.named_parameters()}

    monkeypatch.setattr("cofima.integrations.loop.diagonal_fisher", ones)
    model = network()
    before, trained = learn_two(model, ContinualAverage(model, lam=0.3))
    for key, value in cofima.average(before, trained, 0.3).items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("fisher", [None, "data"])
def test_an_automatic_share_sums_over_tasks(fisher: Any) -> None:
    model = network()
    merger = ContinualAverage(model, lam="auto", fisher=fisher)
    before, trained = learn_two(model, merger)
    twin = network()
    twin.load_state_dict(before)
    old = {key: 2 * value for key, value in cofima.diagonal_fisher(twin, batches(0)).items()}  # two classes
    twin.load_state_dict(trained)
    new = {key: 2 * value for key, value in cofima.diagonal_fisher(twin, batches(0, seed=1)).items()}
    share = cofima.auto_lambda(before, trained, old, new) if fisher is None else 0.5
    assert merger.history[-1].lam == pytest.approx(share, rel=1e-12)
    for key, value in merger.old_fisher.items():
        torch.testing.assert_close(value, old[key] + new[key])


def test_an_equal_step_goes_lam_of_the_way() -> None:
    model = network()
    merger = ContinualAverage(model, lam=0.3, fisher=AverageFisherOptions(share="equal"))
    learn_two(model, merger)
    last = merger.history[-1]
    assert last.distance == pytest.approx(0.3 * last.trained_distance, rel=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", [None, "data"])
def test_rows_that_a_head_gains_are_not_averaged(when: str, how: Any) -> None:
    model = network()
    merger = ContinualAverage(model, lam=0.3, fisher=how)
    with merger.task(one := batches(0)):
        train(model, one)
    before = snapshot(model)
    if when == "before":
        grow(model, 4)
    merger.begin()
    if when == "after":
        grow(model, 4)
    two = batches(2)
    train(model, two)
    trained, places = snapshot(model), {key: p.data_ptr() for key, p in model.named_parameters()}
    merger.end(two)
    merged = model.state_dict()
    assert {key: p.data_ptr() for key, p in model.named_parameters()} == places
    assert torch.equal(merged["2.weight"][2:], trained["2.weight"][2:])
    for key, old in before.items():
        low, high = torch.minimum(old, trained[key][: len(old)]), torch.maximum(old, trained[key][: len(old)])
        assert bool(((merged[key][: len(old)] >= low) & (merged[key][: len(old)] <= high)).all())
        if how is None:
            torch.testing.assert_close(
                merged[key][: len(old)], torch.lerp(old, trained[key][: len(old)], 0.3), rtol=0, atol=0
            )
    with merger.task(three := batches(0, classes=4)):  # Fisher information has the rows of all four
        train(model, three)


def test_a_growing_head_is_the_same_by_rows_and_by_blocks() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = network()[0], nn.ModuleList([copy.deepcopy(network()[2])])

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(torch.tanh(self.body(x))) for head in self.heads], dim=1)

    rows, blocks = network(), Blocks()
    results = []
    for model in (rows, blocks):
        merger = ContinualAverage(model, fisher_history="accumulate")
        for task, loader in enumerate([batches(0), batches(2), batches(0, classes=4, seed=2)]):
            if task == 1:
                if model is rows:
                    grow(rows, 4)
                else:
                    grow(twin := network(), 4)
                    new = nn.Linear(6, 2).double()
                    with torch.no_grad():
                        new.weight.copy_(twin[2].weight[2:])
                        new.bias.copy_(twin[2].bias[2:])
                    blocks.heads.append(new)
            with merger.task(loader):
                train(model, loader)
        results.append(model(loader[0][0]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inside", [False, True])
def test_state_survives_a_file(inside: bool, tmp_path: Any, same_bits: Callable[..., None]) -> None:
    """A second process goes on, between tasks or in the middle of one, to the same bits."""
    whole = network()
    learn_two(whole, ContinualAverage(whole))

    model = network()
    merger = ContinualAverage(model)
    with merger.task(one := batches(0)):
        train(model, one)
    if inside:
        merger.begin()
        train(model, batches(0, seed=1), steps=1)
    torch.save({"model": model.state_dict(), "merger": merger.state_dict()}, tmp_path / "all.pt")

    kept = torch.load(tmp_path / "all.pt", weights_only=True)
    model = network()
    model.load_state_dict(kept["model"])
    merger = ContinualAverage(model)
    merger.load_state_dict(kept["merger"])
    if not inside:
        merger.begin()
    train(model, two := batches(0, seed=1), steps=2 if inside else 3)
    merger.end(two)
    same_bits(snapshot(model), snapshot(whole))
    assert merger.history[0].task == 1


def test_batch_normalization_has_the_statistics_of_the_average() -> None:
    model = network(norm=True)
    merger = ContinualAverage(model, fisher=None)
    learn_two(model, merger)
    assert model.training
    x = [model[0](x) for x, _ in batches(0, seed=1)]
    torch.testing.assert_close(model[1].running_mean, torch.stack([part.mean(0) for part in x]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([part.var(0) for part in x]).mean(0))


class Tagger(nn.Module):
    """Labels for tokens, with the keyword arguments and the output of transformers' models."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5, padding_idx=0)
        self.mix, self.out = nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        words = self.words(input_ids)
        return {"logits": self.out(torch.tanh(self.mix(words + words.mean(1, keepdim=True))))}


def sentences() -> list[dict[str, Tensor]]:
    ids = torch.tensor([[1, 2, 3, 0], [4, 4, 1, 2], [5, 6, 1, 3]])
    return [{"input_ids": ids, "labels": torch.where(ids > 1, ids % 3, -100)}]


def test_tokens_have_the_fisher_information_of_their_sentence() -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    merger = ContinualAverage(model)
    with merger.task(sentences()):
        pass
    expected = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    (batch,) = sentences()
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        loss = cross_entropy(model(ids[None])["logits"][0], labels, reduction="sum")
        for key, grad in zip(expected, torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            expected[key] += grad.square() / 3
    for key, value in merger.old_fisher.items():
        torch.testing.assert_close(value, expected[key])
    assert merger.history[0].classes == 3


def test_tied_weights_are_averaged_once() -> None:
    torch.manual_seed(0)
    model = Tagger(tied=True).double()
    merger = ContinualAverage(model, lam=0.25, fisher=None)
    with merger.task():
        pass
    merger.begin()
    before = model.words.weight.detach().clone()
    with torch.no_grad():
        model.words.weight += 1
    merger.end()
    torch.testing.assert_close(model.words.weight.detach(), before + 0.25)


def test_a_function_says_how_a_batch_becomes_logits_and_labels() -> None:
    model, other = network(), network()
    strange = [{"vectors": x, "answer": y} for x, y in batches(0)]
    merger = ContinualAverage(model, forward=lambda net, batch: (net(batch["vectors"]), batch["answer"]))
    plain = ContinualAverage(other)
    for each, loader in ((merger, strange), (plain, batches(0))):
        with each.task(loader):
            pass
    assert all(torch.equal(value, plain.old_fisher[key]) for key, value in merger.old_fisher.items())


def test_wrappers_are_looked_through() -> None:
    model = network()
    assert ContinualAverage(nn.DataParallel(model)).model is model
    compiled = nn.Module()
    compiled._orig_mod = model  # as torch.compile wraps it, without seconds for its import
    assert ContinualAverage(compiled).model is model


def test_an_error_in_training_leaves_the_weights_alone() -> None:
    model = network()
    merger = ContinualAverage(model)
    with pytest.raises(RuntimeError), merger.task(batches(0)):
        raise RuntimeError
    assert merger.tasks == 0
    with merger.task(batches(0)):
        pass
    assert merger.tasks == 1


def one_sentence(error: pytest.ExceptionInfo[CofimaError]) -> bool:
    return "\n" not in str(error.value)


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("lam must lie", lambda: ContinualAverage(network(), lam=2)),
        ("did you mean 'data'", lambda: ContinualAverage(network(), fisher="date")),  # type: ignore[arg-type]
        ("did you mean 'tasks'", lambda: ContinualAverage(network(), weight="task")),  # type: ignore[arg-type]
        ("meta device", lambda: ContinualAverage(network().to("meta"))),
        ("needs a number for lam", lambda: _equal_auto()),
        ("not known here", lambda: ContinualAverage(network(), fisher=AverageFisherOptions(logits="local"))),
        ("no task has begun", lambda: ContinualAverage(network()).end(batches(0))),
        ("has begun already", _twice),
        ("needs the task's loader", lambda: _ended(None)),
        ("read only once", lambda: _ended(iter(batches(0)))),
        ("no entry 'labels'", lambda: _ended([{"x": torch.zeros(2, WIDTH)}])),
        ("neither a pair", lambda: _ended([torch.zeros(2, WIDTH)])),
        ("not the state", lambda: ContinualAverage(network()).load_state_dict({})),
        ("no Fisher information", _without_fisher),
        ("no Fisher information", _after_the_last),
    ]
    for said, attempt in cases:
        with pytest.raises(CofimaError, match=said) as error:
            attempt()
        assert one_sentence(error), said


def _equal_auto() -> ContinualAverage:
    return ContinualAverage(network(), lam="auto", fisher=AverageFisherOptions(share="equal"))


def _twice() -> None:
    merger = ContinualAverage(network())
    merger.begin()
    merger.begin()


def _ended(loader: Any) -> None:
    merger = ContinualAverage(network())
    merger.begin()
    merger.end(loader)


def _without_fisher() -> None:
    merger = ContinualAverage(network(), fisher=None)
    with merger.task():
        pass
    ContinualAverage(network()).load_state_dict(merger.state_dict())


def _after_the_last() -> None:
    merger = ContinualAverage(network())
    with merger.task(batches(0), last=True):
        pass
    merger.begin()


def test_changed_shapes_are_refused_before_anything_changes() -> None:
    def wider(model: nn.Sequential) -> None:
        model[2] = nn.Linear(7, 2).double()

    def fewer(model: nn.Sequential) -> None:
        model[2] = nn.Linear(6, 1).double()

    def gone(model: nn.Sequential) -> None:
        del model[2]

    for change, heads, said in (
        (wider, None, r"'2.weight' had shape \[2, 6\] and has shape \[2, 7\] now"),
        (fewer, None, "only rows and new weights"),
        (gone, None, "'2.weight' .* is gone now"),
        (lambda model: grow(model, 3), "classifier", "only rows of 'classifier'"),
    ):
        model = network()
        merger = ContinualAverage(model, heads=heads)
        merger.begin()
        change(model)
        before = snapshot(model)
        with pytest.raises(CofimaError, match=said) as error:
            merger.end(batches(0))
        assert one_sentence(error)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_sharded_weights_are_refused() -> None:
    from torch.distributed.tensor import DTensor

    assert {"device_mesh", "placements"} <= set(dir(DTensor))  # by which they are recognized
    model = network()
    model[0].weight.device_mesh = "two devices"  # type: ignore[assignment]
    with pytest.raises(CofimaError, match=r"'0\.weight' is sharded") as error:
        ContinualAverage(model)
    assert one_sentence(error)


def aligned_tasks(
    merger: ContinualAverage, model: nn.Sequential, kind: Any, options: Any = None
) -> nn.Linear:
    """Learn three tasks of two classes each, and align the head after each."""
    for task in range(3):
        if task:
            grow(model, 2 * task + 2)
        with merger.task(loader := batches(2 * task, seed=task)):
            train(model, loader)
        head = merger.align(model[2], loader, kind, options)
    return head


def test_an_aligned_head_is_that_of_the_methods_own_functions() -> None:
    from cofima.core.seeds import Seeds
    from cofima.integrations.heads import _AlignContext
    from cofima.methods.components.alignment import AlignOptions, align, task_of_class
    from cofima.methods.components.gaussians import ClassGaussians, mean_scale
    from cofima.models.head import Head

    model, options = network(), AlignOptions(epochs=2, samples_per_class=8)
    merger = ContinualAverage(model)
    gaussians = ClassGaussians()
    for task in range(2):
        if task:
            grow(model, 4)
        with merger.task(loader := batches(2 * task, seed=task)):
            train(model, loader)
        x, y = (torch.cat(part) for part in zip(*loader, strict=True))
        features = model[1](model[0](x)).detach().float()
        for label in (2 * task, 2 * task + 1):
            gaussians.add(features[y == label])
        found = merger.align(model[2], loader, options=options)
    head = Head(6, [2, 2])
    head.load_flat(model[2].weight.detach().float(), model[2].bias.detach().float())
    context = _AlignContext(torch.device("cpu"), Seeds(0))
    expected = align(head, gaussians, mean_scale(task_of_class(head)), options, context, 1).flat()
    torch.testing.assert_close(found.weight.detach().float(), expected["weight"])
    torch.testing.assert_close(found.bias.detach().float(), expected["bias"])


def test_a_closed_form_head_survives_a_file_and_knows_the_classes(tmp_path: Any) -> None:
    model = network()
    merger = ContinualAverage(model)
    raw = copy.deepcopy(aligned_tasks(merger, model, "lda"))
    torch.save(merger.state_dict(), tmp_path / "merger.pt")
    other = ContinualAverage(model)
    other.load_state_dict(torch.load(tmp_path / "merger.pt", weights_only=True))
    again = other.align(model[2], more := batches(0, seed=9), "lda")  # more of classes that are known
    expected = merger.align(model[2], more, "lda")
    assert torch.equal(again.weight, expected.weight)
    assert not torch.equal(again.weight, raw.weight)
    assert merger.classes.labels == list(range(6))
    assert merger.classes.sizes == [2, 2, 2]


def test_heads_that_cannot_be_are_refused() -> None:
    model = network()
    merger = ContinualAverage(model)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("must be the nn.Linear", lambda: merger.align(network()[2], batches(0))),
        ("nothing else is", lambda: merger.align(model[2], batches(0), "ridge")),  # type: ignore[arg-type]
        ("the other kind", lambda: merger.align(model[2], batches(0), "lda")),
        ("has not ended", lambda: (merger.begin(), merger.align(model[2], batches(0)))),
    ]
    with merger.task(batches(0)):
        pass
    merger.align(model[2], batches(0))
    for said, attempt in cases:
        with pytest.raises(CofimaError, match=said) as error:
            attempt()
        assert one_sentence(error), said
