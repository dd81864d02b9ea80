"""CoFiMA: whose Fisher information is used where, its reductions to CoMA and Eq. 6, and both variants."""

import copy

import pytest
import torch
from torch import Tensor

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.experiment.config import check
from cofima.methods import cofima as module
from cofima.methods.cofima import CoFiMA
from cofima.methods.components import fisher as fisher_module
from cofima.weights import fisher_average, fisher_average_all, snapshot, weight_distance

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def made(tiny, network="vit_test", sizes=(2, 1, 2), method="cofima", train=None, **options):
    stream = tiny.stream(sizes, per_class=8)
    config = tiny.config(method, network, train={"epochs": 2} | (train or {}), options=options)
    return tiny.model(config, stream).method, stream


class Spy:
    """Record each Fisher pass: with which weights, on which task, and what came out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[int, dict[str, Tensor], dict[str, Tensor]]] = []
        real = fisher_module.task_fisher

        def spied(net, task, context, how, passing):
            weights = snapshot(net)
            fisher = real(net, task, context, how, passing)
            self.passes.append((task.index, weights, {k: v.clone() for k, v in fisher.items()}))
            return fisher

        monkeypatch.setattr(module, "task_fisher", spied)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list:
    found: list = []
    train = CoFiMA.train

    def spied(self, task, hooks):
        train(self, task, hooks)
        found.append(snapshot(self.net))

    monkeypatch.setattr(CoFiMA, "train", spied)
    return found


@both
def test_each_merge_is_eq_7_with_the_fisher_of_the_merged_weights_before(
    network: str, tiny, spy: Spy, trained: list, same_bits
) -> None:
    method, stream = made(tiny, network, lam=0.3)
    before: dict[str, Tensor] = {}
    last_fisher: dict[str, Tensor] = {}
    for task in stream:
        start = len(spy.passes)
        method.learn(task)
        passes = spy.passes[start:]
        now = snapshot(method.net)
        assert [index for index, *_ in passes] == [task.index] * (1 if task.index == 0 else 2)
        if task.index:
            same_bits(passes[0][1], trained[-1])  # F_t with theta_t on D_t
            statistics = {k for k in now if "running" in k}
            expected = fisher_average(before, trained[-1], last_fisher, passes[0][2], 0.3)
            kept = now.keys() - statistics
            same_bits({k: now[k] for k in kept}, {k: expected[k] for k in kept})
        same_bits(passes[-1][1], now)  # F*_t with theta*_t on D_t, batch statistics refreshed
        state = {k.removeprefix("fisher."): v for k, v in method.state().items() if k.startswith("fisher.")}
        same_bits(state, passes[-1][2])
        before, last_fisher = now, passes[-1][2]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, [1, 2, 2]),
        ({"fisher_history": "accumulate"}, [1, 1, 1]),
        ({"lam": "auto"}, [1, 1, 1]),
        ({"lam": "auto", "fisher_history": "accumulate"}, [1, 1, 1]),
    ],
    ids=str,
)
def test_how_many_passes_a_task_costs(options: dict, counts: list[int], tiny, spy: Spy) -> None:
    method, stream = made(tiny, **options)
    for task in stream:
        method.learn(task)
    assert [sum(index == t for index, *_ in spy.passes) for t in range(3)] == counts


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, 0),  # all from the pass of F*
        ({"statistics": "trained"}, 0),  # from the pass of F
        ({"fisher_history": "accumulate"}, 1),  # the average is never measured: only the first task is
        ({"variant": "authors"}, 2),  # augmented images
    ],
    ids=str,
)
def test_features_of_a_fisher_pass_are_those_of_a_pass_of_their_own(
    options: dict, own: int, tiny, same_bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"train": {"batch_size": 7, "epochs": 1}, "align": {"epochs": 0}}
    (method, stream), (other, _) = (made(tiny, sizes=(2, 2), **quick, **options) for _ in range(2))
    passes, features = [], CoFiMA.features
    with monkeypatch.context() as patch:
        patch.setattr(CoFiMA, "features", lambda self, images: passes.append(0) or features(self, images))
        for task in stream:
            method.learn(task)
    assert len(passes) == own
    monkeypatch.setattr(fisher_module.PassingFeatures, "all", lambda self, count: None)
    for task in stream:
        other.learn(task)
    same_bits(method.state(), other.state())


@pytest.mark.parametrize(
    ("network", "lam"), [("vit_test", 0.0), ("vit_test", 0.4), ("vit_test", 1.0), ("resnet_test", 0.4)]
)
def test_a_constant_fisher_gives_coma(
    network: str, lam: float, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module,
        "task_fisher",
        lambda net, *_: {k: torch.full_like(p, 3e-7) for k, p in net.named_parameters()},
    )
    a, stream = made(tiny, network, lam=lam)
    b, _ = made(tiny, network, method="coma", lam=lam)
    for task in stream:
        a.learn(task)
        b.learn(task)
    for key, value in b.net.state_dict().items():
        torch.testing.assert_close(a.net.state_dict()[key], value, rtol=2e-5, atol=2e-6)
    for key, value in b.head().flat().items():
        torch.testing.assert_close(a.head().flat()[key], value, rtol=1e-3, atol=1e-4)


@both
def test_all_new_is_slca(network: str, tiny, same_bits) -> None:
    a, stream = made(tiny, network, lam=1.0)
    b, _ = made(tiny, network, method="slca")
    for task in stream:
        a.learn(task)
        b.learn(task)
    same_bits(a.net.state_dict(), b.net.state_dict())
    same_bits(a.head().state_dict(), b.head().state_dict())


@pytest.mark.parametrize("lam", [0.5, "auto"])
def test_accumulated_fishers_give_eq_6_over_all_tasks(lam, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scripted weights after each task, the end is the Fisher-weighted mean of all of them."""
    models, fishers = [], []

    def scripted(self, task, hooks) -> None:
        g = torch.Generator().manual_seed(task.index)
        with torch.no_grad():
            for p in self.net.backbone.parameters():
                p.copy_(torch.randn(p.shape, generator=g))
        self.net.eval()
        models.append({k: v.double() for k, v in snapshot(self.net.backbone).items()})

    def fisher(net, task, *_) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(100 + task.index)
        found = {k: torch.rand(p.shape, generator=g) for k, p in net.named_parameters()}
        fishers.append({k.removeprefix("backbone."): f.double() for k, f in found.items() if "head" not in k})
        return found

    monkeypatch.setattr(CoFiMA, "train", scripted)
    monkeypatch.setattr(module, "task_fisher", fisher)
    method, stream = made(tiny, sizes=(2, 2, 2, 2), lam=lam, fisher_history="accumulate", weight="tasks")
    for task in stream:
        method.learn(task)
    expected = fisher_average_all(models, fishers)
    for key, value in method.net.backbone.state_dict().items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-4, atol=1e-5)


def test_auto_weighs_tasks_by_their_classes(tiny, spy: Spy) -> None:
    method, stream = made(tiny, sizes=(2, 3), lam="auto")
    for task in stream:
        method.learn(task)
    assert method.facts["lam"] == 0.5
    first, second = (fisher for *_, fisher in spy.passes)
    for key, value in second.items():
        total = 3 * value + 2 * first[key] if key in first else 3 * value
        torch.testing.assert_close(method.state()[f"fisher.{key}"], total)


def test_frozen_old_rows_are_merged_to_themselves(tiny, trained: list) -> None:
    method, stream = made(tiny, sizes=(3, 3, 2))
    for task in stream:
        method.learn(task)
    for block in (0, 1, 2):
        for key in ("weight", "bias"):
            name = f"blocks.{block}.{key}"
            assert torch.equal(method.net.head.state_dict()[name], trained[block][f"head.{name}"])


@pytest.mark.parametrize("logits", ["seen", "local"])
def test_a_single_class_has_information(logits: str, tiny, spy: Spy) -> None:
    """Over its one own logit the Fisher would be 0, and what was learned would be thrown away."""
    method, stream = made(tiny, sizes=(2, 1), fisher={"logits": logits})
    for task in stream:
        method.learn(task)
    assert all(sum(float(f.sum()) for f in fisher.values()) > 0 for *_, fisher in spy.passes)


def test_options_of_the_fisher_do_what_they_say(tiny) -> None:
    method, stream = made(tiny, sizes=(2, 2))
    for task in stream:
        method.learn(task)
    how = fisher_module.FisherOptions
    plain, normed, cut = (
        fisher_module.task_fisher(method.net, stream[1], method.context, options)
        for options in (how(), how(norm="mean"), how(clip=1e-5))
    )
    count = sum(f.numel() for f in plain.values())
    assert sum(float(f.double().sum()) for f in normed.values()) == pytest.approx(count, rel=1e-4)
    for key, value in plain.items():
        assert torch.equal(cut[key], value.clamp(max=1e-5))
    assert max(float(f.max()) for f in plain.values()) > 1e-5
    local = fisher_module.task_fisher(method.net, stream[1], method.context, how(logits="local"))
    assert not local["head.blocks.0.weight"].any()
    assert plain["head.blocks.0.weight"].any()


# --- what the authors' code does -------------------------------------------------------------------


@both
def test_the_released_variant(
    network: str, tiny, trained: list, monkeypatch: pytest.MonkeyPatch, same_bits
) -> None:
    fishers = []
    real = module.released_fisher

    def spied(net, task, context):
        weights = snapshot(net)
        same_bits(weights, trained[-1])  # of the trained weights, never of the merged ones
        fishers.append(real(net, task, context))
        same_bits(snapshot(net), weights)
        return fishers[-1]

    monkeypatch.setattr(module, "released_fisher", spied)
    monkeypatch.setattr(module, "task_fisher", lambda *_: pytest.fail("the paper's Fisher"))
    method, stream = made(tiny, network, (2, 3, 2), variant="authors", align={"epochs": 0})
    before = None
    for task in stream:
        method.learn(task)
        assert len(fishers) == task.index + 1
        assert all(float(f.min()) >= 0 and float(f.max()) <= 1e-4 for f in fishers[-1].values())
        new = trained[-1]
        raw = {k.removeprefix("head."): v for k, v in new.items() if k.startswith("head.")}
        same_bits(method.net.head.state_dict(), raw)  # the chain goes on unmerged, unscaled
        own = f"blocks.{task.index}.weight"
        predicting = method.head().state_dict()[own]
        if before is None:
            assert torch.equal(predicting, raw[own])
        else:
            assert torch.equal(predicting, raw[own] * fishers[-1][f"head.{own}"])
            assert float(predicting.abs().max()) < 1e-3
            merged = fisher_average(before, new, fishers[-2], fishers[-1], 0.4)
            for key, value in method.net.backbone.state_dict().items():
                if "running" not in key:
                    assert torch.equal(value, merged[f"backbone.{key}"])
        before = snapshot(method.net)


def test_the_released_fisher_is_the_square_of_batch_gradients(tiny) -> None:
    method, stream = made(tiny, sizes=(2, 2), train={"batch_size": 8})
    for task in stream:
        method.learn(task)
    found = fisher_module.released_fisher(method.net, stream[1], method.context)
    net = copy.deepcopy(method.net).train()
    context, total, count = method.context, {}, 0
    augment = context.seeds.generator("fisher augment", 1)
    from cofima.training.loop import batches

    for at in batches(len(stream[1].train), 8, context.seeds.generator("fisher loader", 1)):
        pixels, labels = stream[1].train.batch(at)
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(context.view.train(pixels, augment)), labels).backward()
        for name, p in net.named_parameters():
            total[name] = total.get(name, 0) + (0 if p.grad is None else p.grad.square())
        count += 1
    for name, p in net.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(
                found[name], (total[name] / count).clamp(max=1e-4), rtol=1e-4, atol=1e-10
            )


@pytest.mark.parametrize("variant", ["paper", "authors"])
@pytest.mark.parametrize("history", ["last", "accumulate"])
@pytest.mark.parametrize("lam", [0.4, "auto"])
@pytest.mark.parametrize("statistics", ["merged", "trained"])
def test_every_combination_of_options_learns_or_is_refused(
    variant: str, history: str, lam, statistics: str, tiny
) -> None:
    options = {"variant": variant, "fisher_history": history, "lam": lam, "statistics": statistics}
    if variant == "authors" and (history == "accumulate" or lam == "auto"):
        with pytest.raises(CofimaError, match="variant=authors"):
            check({"method": "cofima", "options": options})
        return
    resolved = methods.options_of(methods.build("cofima", options))
    assert resolved | options == resolved
    method, stream = made(tiny, sizes=(2, 1, 2), train={"epochs": 1}, **options)
    for task in stream:
        method.learn(task)
    assert all(torch.isfinite(v).all() for v in method.state().values() if v.is_floating_point())
    assert torch.isfinite(method.head().flat()["weight"]).all()
    assert not hasattr(method, "old")
    assert not hasattr(method, "raw_head")


# --- equal steps -----------------------------------------------------------------------------------


@both
def test_equal_steps_go_lam_of_the_way(network: str, tiny, trained: list) -> None:
    method, stream = made(tiny, network, (2, 2, 2), lam=0.3, fisher={"share": "equal"})
    before: dict[str, Tensor] = {}
    for task in stream:
        method.learn(task)
        now = snapshot(method.net)
        if task.index:
            own = {key for key, _ in method.net.named_parameters()} & before.keys()
            way, step = (
                weight_distance({k: before[k] for k in own}, {k: end[k] for k in own})
                for end in (trained[-1], now)
            )
            assert step == pytest.approx(0.3 * way, rel=1e-5)
            assert any("share 0.300" in note for note in method.facts["notes"])
        before = now


@pytest.mark.parametrize("history", ["last", "accumulate"])
def test_equal_steps_do_not_depend_on_the_scale_of_the_new_fisher(
    history: str, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ends = fisher_module.task_fisher, []
    for factor in (1.0, 1e4):
        monkeypatch.setattr(
            module,
            "task_fisher",
            lambda net, task, *rest, factor=factor: {
                k: v * factor ** (task.index == 1) for k, v in real(net, task, *rest).items()
            },
        )
        method, stream = made(tiny, sizes=(2, 2), fisher={"share": "equal"}, fisher_history=history)
        for task in stream:
            method.learn(task)
        ends.append(snapshot(method.net))
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-4, atol=1e-6)


def test_a_step_out_of_reach_is_noted(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fisher_module.task_fisher

    def nothing_new(net, task, *given):  # no weight matters for the second task
        return {k: v * (task.index == 0) + (task.index == 0) for k, v in real(net, task, *given).items()}

    monkeypatch.setattr(module, "task_fisher", nothing_new)
    method, stream = made(tiny, sizes=(2, 2), fisher={"share": "equal"})
    for task in stream:
        method.learn(task)
    assert any("the nearest is taken" in note for note in method.facts["notes"])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("cofima", {"variant": "authors"}, "not for variant=authors"),
        ("cofima", {"lam": "auto"}, "needs a number for lam"),
        ("coma", {}, r"options\.fisher\.share"),
        ("ewc", {}, r"options\.fisher\.share"),
    ],
)
def test_equal_steps_are_refused_where_they_mean_nothing(method: str, options: dict, message: str) -> None:
    with pytest.raises(CofimaError, match=message):
        check({"method": method, "options": options | {"fisher": {"share": "equal"}}})


@pytest.mark.parametrize("history", ["last", "accumulate"])
def test_fisher_information_may_be_kept_in_half_the_room(history: str, tiny, tmp_path, same_bits) -> None:
    """Rounded when it is kept, so that a run that is continued ends with the same bits."""
    stream, found = tiny.stream((2, 2)), {}
    for kept in ("float32", "bfloat16"):
        options = {"fisher": {"kept": kept}, "fisher_history": history}
        config = tiny.config("cofima", train={"epochs": 1}, options=options)
        cut, found[kept] = (tiny.model(config, stream).method for _ in range(2))
        for method in (cut, found[kept]):
            method.learn(stream[0])
        state = {key: value.clone() for key, value in cut.state().items()}
        assert {value.dtype for key, value in state.items() if key.startswith("fisher.")} == {
            getattr(torch, kept)
        }
        cut.restore(state)
        for method in (cut, found[kept]):
            method.learn(stream[1])
        same_bits(cut.net.state_dict(), found[kept].net.state_dict())
    exact, rounded = (snapshot(method.net) for method in found.values())
    assert 0 < weight_distance(rounded, exact) < 0.01 * found["float32"].facts["trained_distance"]
