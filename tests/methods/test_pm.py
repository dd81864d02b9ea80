"""P&M: the share by a search over quadratic losses, perturbed steps, its limits, its state."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cofima.methods.components.aligned import Aligned
from cofima.methods.pm import PM
from cofima.store.model import load_model
from cofima.weights import snapshot
from cofima.weights.distance import least_loss


def made(tiny, network="vit_test", sizes=(2, 2, 2), epochs=2, **options):
    stream = tiny.stream(sizes, per_class=8)
    config = tiny.config("pm", network, train={"epochs": epochs}, options=options)
    return tiny.model(config, stream).method, stream


def draw(count: int) -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(5)
    return [
        {"a": torch.randn(4, 3, generator=chance), "b": torch.randn(5, generator=chance)}
        for _ in range(count)
    ]


def test_the_share_has_the_least_sum_of_all_quadratic_losses() -> None:
    """By a search over the segment, of losses that are kept one by one."""
    old, new, *centers = draw(5)
    fishers = [{key: value.square() for key, value in one.items()} for one in draw(9)[5:]]
    tasks = [*zip(centers, fishers, strict=False), (new, fishers[3])]

    def loss(share: float) -> float:
        at = {key: old[key] + share * (new[key] - old[key]) for key in old}
        return sum(float((f[k] * (at[k] - c[k]).square()).sum()) for c, f in tasks for k in at)

    curvature = {k: sum(f[k] for _, f in tasks[:-1]) for k in old}
    center = {k: sum(f[k] * c[k] for c, f in tasks[:-1]) / curvature[k] for k in old}
    found = least_loss(old, new, center, curvature, fishers[3])
    assert 0 < found < 1
    assert loss(found) <= min(loss(share / 1000) for share in range(1001)) + 1e-6


def test_limits_of_the_share() -> None:
    old, new = draw(2)
    one, nothing = ({k: torch.full_like(v, x) for k, v in old.items()} for x in (1.0, 0.0))
    assert least_loss(old, new, {}, {}, one) == 1  # the first task
    assert least_loss(old, new, old, one, one) == pytest.approx(0.5)  # halfway between equals
    assert least_loss(old, new, old, one, nothing) == 0
    assert least_loss(old, old, old, one, one) == 1  # nothing moved
    far = {k: v + 10 * (new[k] - v) for k, v in old.items()}
    assert least_loss(old, new, far, one, one) == 1  # no farther than the new weights
    behind = {k: v - 10 * (new[k] - v) for k, v in old.items()}
    assert least_loss(old, new, behind, one, one) == 0


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_the_network_is_the_merge_at_the_share_of_all_tasks(
    network: str, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, stream = made(tiny, network)
    kept: list = []
    really = PM.trained_fisher

    def spied(self, task):
        kept.append((snapshot(self.net.backbone), really(self, task)))
        return kept[-1][1]

    monkeypatch.setattr(PM, "trained_fisher", spied)
    for task in stream:
        start = snapshot(method.net.backbone)
        method.learn(task)
        now, (trained, _) = dict(method.net.backbone.named_parameters()), kept[-1]
        above = below = 0.0
        for weights, fisher in kept:
            for key in now:
                d, f = trained[key].double() - start[key].double(), fisher[key].double()
                above -= float((f * (start[key].double() - weights[key].double()) * d).sum())
                below += float((f * d.square()).sum())
        share = min(1.0, max(0.0, above / below))
        if task.index:
            assert method.facts["lam"] == pytest.approx(share, rel=1e-3)
        for key, value in now.items():
            expected = torch.lerp(start[key], trained[key], share)
            torch.testing.assert_close(value.detach(), expected, rtol=1e-4, atol=1e-6)


def test_steps_see_the_weights_and_both_perturbations(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    method, stream = made(tiny, epochs=8, epsilon=0.5)
    seen: list[float] = []
    really = Aligned.loss

    def spied(self, batch):
        key = next(k for k, v in self.net.backbone.named_parameters() if v.ndim > 1)
        at = dict(self.net.backbone.named_parameters())[key].detach() - self.old[key]
        there = real[key].detach() - self.old[key]
        seen.append(float(at.norm() / there.norm()) if there.norm() > 0 else 1.0)
        return really(self, batch)

    real = dict(method.net.backbone.named_parameters())
    monkeypatch.setattr(Aligned, "loss", spied)
    for task in stream:
        method.learn(task)
    assert {round(value, 2) for value in seen} == {0.5, 1.0, 1.5}


def test_without_perturbations_training_is_that_of_slca(tiny, same_bits) -> None:
    found = []
    for name, options in (("pm", {"perturbed": 0.0}), ("pm", {"epsilon": 0.0}), ("slca", {})):
        stream = tiny.stream((2, 2), per_class=8)
        config = tiny.config(name, train={"epochs": 2}, options=options)
        method = tiny.model(config, stream).method
        method.learn(stream[0])
        found.append(snapshot(method.net.backbone))
    same_bits(found[0], found[2])
    same_bits(found[1], found[2])


def test_a_folder_keeps_the_losses_of_all_tasks(tiny, tmp_path: Path, same_bits) -> None:
    stream = tiny.stream((2, 2, 2))
    model = tiny.run(tmp_path, tiny.config("pm", train={"epochs": 1}), stream)
    method = load_model(tmp_path).method
    same_bits(method.center, model.method.center)
    same_bits(method.old_fisher, model.method.old_fisher)
