"""EWC: a quadratic pull, by Fisher information, towards the old weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.methods.components.fisher import FisherOptions, task_fisher
from cofima.methods.ewc import quadratic
from cofima.training.loop import plain_batches


def made_for(tiny, stream, network="vit_test", train=None, **options):
    return tiny.model(
        tiny.config("ewc", network, options=options, train=train or {"epochs": 2}), stream
    ).method


def begun(made, task):
    """Bring a method to where its first step would be taken."""
    made.task, made.facts = task, {"seconds": {}, "notes": [], "lam": None}
    made.begin(task)
    return dict(made.net.named_parameters())


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_the_gradient_is_the_analytic_one_and_fresh_rows_are_free(network: str, tiny) -> None:
    stream = tiny.stream((2, 2))
    made = made_for(tiny, stream, network, lamb=2.0)
    made.learn(stream[0])
    fisher = task_fisher(made.net, stream[0], made.context, FisherOptions(logits="local"))
    old = {key: value.detach().clone() for key, value in made.net.named_parameters()}
    now = begun(made, stream[1])
    made.net.eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in now.values():
            value.add_(0.1 * torch.randn(value.shape, generator=rng))
    images, labels = next(plain_batches(stream[1].train, made.context, "x"))
    own = torch.autograd.grad(
        cross_entropy(made.net(images)[:, 2:], labels - 2), now.values(), allow_unused=True
    )
    both = torch.autograd.grad(made.loss(tiny.batch(images, labels)), now.values())
    for (key, value), a, b in zip(now.items(), own, both, strict=True):
        if key in old:
            pull = 2.0 * fisher[key] * (value.detach() - old[key])
            torch.testing.assert_close(b, (0 if a is None else a) + pull, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(a, b)
    assert set(now) - set(old) == {"head.blocks.1.weight", "head.blocks.1.bias"}
    penalty = made.loss(tiny.batch(images, labels)) - cross_entropy(made.net(images)[:, 2:], labels - 2)
    slow = sum((fisher[k] * (now[k] - old[k]) ** 2).sum() for k in old)  # lamb / 2 is 1
    torch.testing.assert_close(penalty, slow, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_the_forms_agree_for_one_old_task(network: str, tiny, same_bits) -> None:
    stream = tiny.stream((2, 2))
    nets = []
    for form in ("online", "separate"):
        made = made_for(tiny, stream, network, lamb=5.0, form=form)
        for task in stream:
            made.learn(task)
        nets.append(made.net.state_dict())
    same_bits(*nets)


def scripted(tiny, **options):
    """Learn three tasks; return the method, and Fisher information and weights after each."""
    stream = tiny.stream((2, 2, 2))
    made = made_for(tiny, stream, lamb=1.0, **options)
    fishers, weights = [], []
    for task in stream:
        made.learn(task)
        fishers.append(task_fisher(made.net, task, made.context, FisherOptions(logits="local")))
        weights.append({k: v.detach().clone() for k, v in made.net.named_parameters()})
    return made, fishers, weights


def test_online_sums_decay_and_the_anchor_is_the_last_weights(tiny) -> None:
    made, fishers, weights = scripted(tiny, gamma=0.5)
    for key, value in made.importance.items():
        past = [0.5 ** (2 - t) * f[key] for t, f in enumerate(fishers) if key in f]
        torch.testing.assert_close(value, sum(past))
    assert made.center == {}
    begun(made, tiny.stream((2, 2, 2, 2))[3])
    assert all(torch.equal(a, weights[2][k]) for a, k in zip(made.anchor, weights[2], strict=True))


def test_separate_penalties_have_the_gradient_of_their_sum(tiny) -> None:
    made, fishers, weights = scripted(tiny, form="separate")
    rng = torch.Generator().manual_seed(0)
    for key, total in made.importance.items():
        point = weights[2][key] + torch.randn(total.shape, generator=rng)
        each = [f[key] * (point - w[key]) for f, w in zip(fishers, weights, strict=True) if key in f]
        torch.testing.assert_close(total * (point - made.center[key]), sum(each), rtol=1e-4, atol=1e-6)
    assert len(made.state()) == 2 * len(made.importance)  # does not grow with the tasks


def test_a_strong_penalty_keeps_what_mattered(tiny) -> None:
    def far(lamb: float) -> float:
        stream = tiny.stream((2, 2))
        made = made_for(tiny, stream, lamb=lamb, train={"epochs": 3, "lr": 0.02})
        made.learn(stream[0])
        old = {k: v.detach().clone() for k, v in made.net.named_parameters()}
        fisher = dict(made.importance)
        made.learn(stream[1])
        now = dict(made.net.named_parameters())
        return sum(float((fisher[k] * (now[k] - old[k]).detach() ** 2).sum()) for k in old)

    assert far(100) < 0.3 * far(0)


def test_what_sgd_cannot_follow_is_held_less_firmly_and_said(tiny) -> None:
    stream = tiny.stream((2, 2))
    made = made_for(tiny, stream, lamb=1e6)
    made.learn(stream[0])
    assert not made.facts["notes"]
    begun(made, stream[1])
    how, keys = made.context.train, list(made.importance)
    for key, pull in zip(keys, made.pull, strict=True):
        rate = how.lr * (how.backbone_lr_scale if key.startswith("backbone.") else 1)
        assert float((rate * 1e6 * pull).max()) <= 1 + 1e-5
        free = made.importance[key] < 1 / (rate * 1e6)
        assert torch.equal(pull[free], made.importance[key][free])
    assert any("more than SGD can follow" in note for note in made.facts["notes"])
    made = made_for(tiny, stream, lamb=1e6)
    for task in stream:
        made.learn(task)  # and it does not diverge
    assert all(torch.isfinite(v).all() for v in made.net.state_dict().values() if v.is_floating_point())


def test_the_quadratic_and_its_gradient_are_the_analytic_ones() -> None:
    rng = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    weights = [torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in shapes]
    center, importance = (
        [torch.rand(s, generator=rng, dtype=torch.float64) for s in shapes] for _ in range(2)
    )
    value = quadratic(weights, center, importance)
    slow = sum((f * (w - c) ** 2).sum() / 2 for w, c, f in zip(weights, center, importance, strict=True))
    torch.testing.assert_close(value, slow)
    for mine, other in zip(
        torch.autograd.grad(7 * value, weights), torch.autograd.grad(7 * slow, weights), strict=True
    ):
        torch.testing.assert_close(mine, other)
