"""EMA: the closed form of the moving average, where it starts, and where the next task goes on."""

import pytest
import torch

from cofima.methods.components.aligned import Aligned
from cofima.weights import snapshot

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])


def made(tiny, method="ema", network="vit_test", sizes=(2, 1, 2), **options):
    stream = tiny.stream(sizes, per_class=8)
    return tiny.model(
        tiny.config(method, network, train={"epochs": 2}, options=options), stream
    ).method, stream


def closed_form(start, steps, new):
    """Return the sum that the recursion is when it is written out; ``new`` is the share of each step."""
    old, last = 1 - new, len(steps)
    total = old**last * start.double()
    for number, step in enumerate(steps, start=1):
        total = total + new * old ** (last - number) * step.double()
    return total


@pytest.mark.parametrize(("form", "new"), [("standard", 0.1), ("as_printed", 0.9)])
def test_a_scripted_trajectory_has_its_closed_form(
    form: str, new: float, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight is set to chosen values, step by step; two tasks, the second from the first's average."""
    method, stream = made(tiny, sizes=(2, 2), decay=0.9, form=form)
    method.net.double()
    batch = tiny.batch(torch.empty(0), torch.empty(0))  # it looks at the weights alone
    script = torch.Generator().manual_seed(4)
    began: list = []
    taken: list = []

    def train(self, task, hooks):
        began.append(snapshot(self.net))
        taken.append([])
        for _ in range(7):
            for value in self.net.state_dict().values():
                value.add_(torch.randn(value.shape, generator=script, dtype=torch.float64))
            taken[-1].append(snapshot(self.net))
            self.after_step(batch)

    begin = Aligned.begin
    monkeypatch.setattr(Aligned, "begin", lambda self, task: (begin(self, task), self.net.double())[0])
    monkeypatch.setattr(Aligned, "train", train)
    monkeypatch.setattr(Aligned, "remember", lambda *_: None)
    monkeypatch.setattr(Aligned, "align_head", lambda *_: None)
    for task in stream:
        before = snapshot(method.net)
        method.learn(task)
        for key, value in before.items():
            assert torch.equal(began[-1][key], value), key  # the training goes on from the average
        for key, value in method.net.state_dict().items():
            expected = closed_form(began[-1][key], [w[key] for w in taken[-1]], new)
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list of tasks, each the list of weights at its start and after each of its steps."""
    from cofima.methods.ema import EMA

    found: list = []
    begin, after = EMA.begin, EMA.after_step
    monkeypatch.setattr(
        EMA, "begin", lambda self, task: (begin(self, task), found.append([snapshot(self.net)]))[0]
    )
    monkeypatch.setattr(
        EMA, "after_step", lambda self, batch: (found[-1].append(snapshot(self.net)), after(self, batch))[1]
    )
    return found


@both
@pytest.mark.parametrize(("form", "new"), [("standard", 0.2), ("as_printed", 0.8)])
def test_real_training_has_its_closed_form(form: str, new: float, network: str, tiny, steps: list) -> None:
    method, stream = made(tiny, network=network, decay=0.8, form=form)
    for task in stream:
        method.learn(task)
        start, *path = steps[-1]
        assert len(path) >= 2
        now = method.net.state_dict()
        moved = 0
        for key, value in now.items():
            if "running" in key:
                continue  # estimated anew, below
            if not value.is_floating_point():
                assert torch.equal(value, path[-1][key])
                continue
            expected = closed_form(start[key], [w[key] for w in path], new)
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
            moved += not torch.equal(path[-1][key], value)
        assert moved > 10
        for index in range(task.index):  # old rows were frozen: their average is themselves
            assert torch.equal(now[f"head.blocks.{index}.weight"], start[f"head.blocks.{index}.weight"])


@both
def test_the_next_task_starts_from_the_average(network: str, tiny, steps: list, same_bits) -> None:
    method, stream = made(tiny, network=network, decay=0.8)
    before = snapshot(method.net)
    for task in stream:
        method.learn(task)
        same_bits({key: steps[-1][0][key] for key in before}, before)
        before = snapshot(method.net)


@both
def test_no_memory_is_slca(network: str, tiny, same_bits) -> None:
    ours, stream = made(tiny, network=network, decay=0.0)
    printed, _ = made(tiny, network=network, decay=1.0, form="as_printed")
    slca, _ = made(tiny, "slca", network)
    for task in stream:
        for method in (ours, printed, slca):
            method.learn(task)
        for method in (ours, printed):
            same_bits(method.net.state_dict(), slca.net.state_dict())
            same_bits(method.head().state_dict(), slca.head().state_dict())
            same_bits(method.state(), slca.state())


def test_the_average_measures_its_own_batch_statistics(tiny) -> None:
    stream = tiny.stream((2, 2))
    config = tiny.config("ema", "resnet_test", train={"epochs": 3, "batch_size": 64}, options={"decay": 0.5})
    method = tiny.model(config, stream).method
    method.learn(stream[0])
    seen = []
    method.net.backbone.bn1.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    images = method.context.view.test(stream[0].train.batch(torch.arange(len(stream[0].train)))[0])
    with torch.no_grad():
        method.net(images)
    torch.testing.assert_close(method.net.backbone.bn1.running_mean, seen[0].mean((0, 2, 3)))
    torch.testing.assert_close(method.net.backbone.bn1.running_var, seen[0].var((0, 2, 3)))


def test_where_nothing_was_trained_batch_statistics_stay(tiny, same_bits) -> None:
    method, stream = made(tiny, network="resnet_test", sizes=(1, 2))
    start = snapshot(method.net.backbone)
    method.learn(stream[0])
    same_bits(snapshot(method.net.backbone), start)


def test_as_printed_is_almost_no_average(tiny) -> None:
    """The paper's formula gives 0.999 to the new weights: what differs from SLCA is a thousandth."""
    plain, stream = made(tiny, "slca", sizes=(2, 2))
    printed, _ = made(tiny, form="as_printed", sizes=(2, 2), decay=0.999)
    usual, _ = made(tiny, sizes=(2, 2), decay=0.999)
    start = snapshot(plain.net.backbone)
    for method in (plain, printed, usual):
        method.learn(stream[0])

    def apart(a, b):
        return float(sum((a[k] - b[k]).square().sum() for k in a) ** 0.5)

    nets = [snapshot(method.net.backbone) for method in (plain, printed, usual)]
    assert apart(nets[1], nets[0]) < 0.01 * apart(nets[0], start)
    assert apart(nets[2], start) < 0.01 * apart(nets[0], start)


def test_the_shadow_is_let_go(tiny) -> None:
    method, stream = made(tiny)
    method.learn(stream[0])
    assert not {"old", "shadow", "followed"} & vars(method).keys()
    assert method.facts["trained_distance"] > 0
