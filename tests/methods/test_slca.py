"""SLCA: fine-tuning below, an aligned copy of the head above."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.methods.components.alignment import align
from cofima.training.loop import plain_batches

SIZES = (2, 1, 3)


def learn(tiny, method="slca", sizes=SIZES, network="vit_test", **more):
    stream = tiny.stream(sizes, per_class=8)
    model = tiny.model(tiny.config(method, network, train={"epochs": 2}, **more), stream)
    for task in stream:
        model.method.learn(task)
        yield model, task


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_the_raw_chain_is_plain_fine_tuning(network: str, tiny, same_bits) -> None:
    pairs = zip(
        learn(tiny, sizes=(2, 2, 2), network=network), learn(tiny, "seq_ft", (2, 2, 2), network), strict=True
    )
    for (slca, _), (plain, _) in pairs:
        same_bits(slca.method.net.state_dict(), plain.method.net.state_dict())


def test_the_first_task_is_not_aligned_and_later_ones_are(tiny) -> None:
    for model, task in learn(tiny):
        if task.index == 0:
            assert model.method.head() is model.method.net.head
        else:
            expected = align(
                model.method.net.head,
                model.method.gaussians,
                model.method.mean_scale(task.classes.stop),
                model.method.align,
                model.method.context,
                task.index,
            )
            assert torch.equal(model.method.head().flat()["weight"], expected.flat()["weight"])
            assert not torch.equal(expected.flat()["weight"], model.method.net.head.flat()["weight"])


def test_alignment_at_the_end_is_done_once(tiny, same_bits) -> None:
    each = [copy.deepcopy(model.method.head()) for model, _ in learn(tiny)]
    for model, task in learn(tiny, options={"alignment": "end"}):
        if task.index < 2:
            assert model.method.head() is model.method.net.head
        else:
            same_bits(model.method.head().state_dict(), each[2].state_dict())


def test_without_alignment_the_raw_head_predicts(tiny, same_bits) -> None:
    *_, (model, _) = learn(tiny, options={"align": {"epochs": 0}})
    same_bits(model.method.head().flat(), model.method.net.head.flat())


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_gaussians_are_of_the_features_at_test_time(network: str, tiny) -> None:
    for model, task in learn(tiny, network=network):
        with torch.inference_mode():
            pairs = list(plain_batches(task.train, model.method.context, "x"))
            features = torch.cat([model.method.net.features(x) for x, _ in pairs])
        labels = torch.cat([y for _, y in pairs])
        assert len(model.method.gaussians) == task.classes.stop
        for label in task.classes:
            mean = features[labels == label].double().mean(0).float()
            assert torch.equal(model.method.gaussians.means[label], mean)


def test_old_gaussians_are_never_refreshed(tiny) -> None:
    first = None
    for model, _ in learn(tiny):
        first = model.method.gaussians.means[0].clone() if first is None else first
        assert torch.equal(model.method.gaussians.means[0], first)


def test_few_images_are_noted(tiny) -> None:
    stream = tiny.stream((2, 2), per_class=3)
    model = tiny.model(tiny.config("slca", train={"epochs": 1}), stream)
    model.method.learn(stream[0])
    assert any("2 of 2 new classes have few images" in note for note in model.method.facts["notes"])


def test_a_single_class_meets_features_of_the_old_ones(tiny) -> None:
    """They move the new row only: not the backbone, not the old rows."""
    stream = tiny.stream((3, 1))
    model = tiny.model(tiny.config("slca", train={"epochs": 1}), stream)
    method = model.method
    method.learn(stream[0])
    method.task, method.facts = stream[1], {"seconds": {}, "notes": [], "lam": None}
    method.begin(stream[1])
    images, labels = next(plain_batches(stream[1].train, method.context, "x"))

    def gradients(loss):
        moving = [p for p in method.net.parameters() if p.requires_grad]
        return torch.autograd.grad(loss, moving)

    own = gradients(cross_entropy(method.net(images), labels))
    both = gradients(method.loss(tiny.batch(images, labels)))
    for a, b in zip(own[:-2], both[:-2], strict=True):  # all but the new row's weight and bias
        torch.testing.assert_close(a, b)
    assert not torch.allclose(own[-2], both[-2])
    assert len(own) == len(list(method.net.backbone.parameters())) + 2
    first, second = method.loss(tiny.batch(images, labels)), method.loss(tiny.batch(images, labels))
    assert first.item() != second.item()  # drawn afresh each step
    assert first.item() > cross_entropy(method.net(images), labels).item()


def test_as_many_old_features_as_new_images_are_drawn(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from cofima.methods.components.gaussians import Sampler

    counts = []
    draw = Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda self, n, g: (counts.append(n), draw(self, n, g))[1])
    stream = tiny.stream((3, 1))
    options = {"align": {"epochs": 0}}
    model = tiny.model(tiny.config("slca", train={"epochs": 1, "batch_size": 5}, options=options), stream)
    for task in stream:
        model.method.learn(task)
    assert [sum(n) for n in counts] == [5, 5, 2]
    assert all(len(n) == 3 for n in counts)


def test_the_state_holds_the_raw_head_beside_the_aligned_one(tiny, same_bits) -> None:
    *_, (model, _) = learn(tiny)
    state = model.method.state()
    assert torch.equal(state["raw_head.weight"], model.method.net.head.flat()["weight"])
    assert not torch.equal(state["raw_head.weight"], model.weights()["head.weight"])
    assert torch.equal(model.weights()["head.weight"], model.method.head().flat()["weight"])
