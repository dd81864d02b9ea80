"""Seq FT: the bare procedure; and what all fine-tuning methods share: local cross-entropy, single classes."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.training.loop import plain_batches, sgd


def learned(tiny, network: str, sizes, tasks: int | None = None, method: str = "seq_ft", **more):
    stream = tiny.stream(sizes)
    model = tiny.model(tiny.config(method, network, **more), stream)
    for task in list(stream)[:tasks]:
        model.method.learn(task)
    return model.method, stream


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_it_is_training_on_one_task_after_another(network: str, tiny, same_bits) -> None:
    method, stream = learned(tiny, network, (2, 3), train={"epochs": 2})
    context = method.context
    net = tiny.net(network, seed=3)
    for task in stream:
        first = task.classes.start
        net.grow(len(task.classes), context.seeds.generator("head", task.index))
        sgd(
            net,
            task.train,
            lambda b, k=first: cross_entropy(net(b.images)[:, k:], b.labels - k),
            context,
            task.index,
        )
    same_bits(method.net.state_dict(), net.state_dict())


def test_the_loss_is_cross_entropy_on_the_task_s_own_logits(tiny) -> None:
    method, stream = learned(tiny, "vit_test", (3, 3, 2))
    images, labels = next(plain_batches(stream[2].train, method.context, "x"))
    expected = cross_entropy(method.net(images)[:, 6:8], labels - 6)
    assert torch.equal(method.loss(tiny.batch(images, labels)), expected)
    wider = cross_entropy(method.net(images), labels)
    assert method.loss(tiny.batch(images, labels)).item() < wider.item()


def test_old_blocks_have_no_gradient_and_stay_bit_identical(tiny, same_bits) -> None:
    stream = tiny.stream((3, 3, 2))
    model = tiny.model(tiny.config("seq_ft", train={"weight_decay": 0.3}), stream)
    after = []
    for task in stream:
        model.method.learn(task)
        after.append(copy.deepcopy(model.method.net.head.state_dict()))
    for key, value in after[0].items():
        assert torch.equal(after[2][key], value)
    for key, value in after[1].items():
        assert torch.equal(after[2][key], value)
    assert not torch.equal(after[2]["blocks.2.weight"][:2], after[1]["blocks.1.weight"][:2])
    images, labels = next(plain_batches(stream[2].train, model.method.context, "x"))
    model.method.loss(tiny.batch(images, labels)).backward()
    assert all(p.grad is None for p in model.method.net.head.blocks[:2].parameters())


# --- one class at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "network"),
    [*((name, "vit_test") for name in ("seq_ft", "slca", "coma", "cofima")), ("cofima", "resnet_test")],
)
def test_a_first_task_of_one_class_trains_nothing_and_says_so(
    method: str, network: str, tiny, same_bits
) -> None:
    made, _ = learned(tiny, network, (1, 2), tasks=1, method=method)
    same_bits(made.net.backbone.state_dict(), tiny.net(network, seed=3).backbone.state_dict())
    assert any("one class" in note for note in made.facts["notes"])
    assert not made.net.training


def test_a_single_new_class_competes_with_all_classes_seen(tiny) -> None:
    method, stream = learned(tiny, "vit_test", (2, 1))
    images, labels = next(plain_batches(stream[1].train, method.context, "x"))
    assert torch.equal(method.loss(tiny.batch(images, labels)), cross_entropy(method.net(images), labels))
    assert method.loss(tiny.batch(images, labels)).item() > 0


def accuracy_by_class(method, stream, classes: int) -> list[float]:
    found = []
    for task in stream:
        for images, labels in plain_batches(task.test, method.context, "x"):
            right = method.predict(images).argmax(1) == labels
            found += [(int(y), bool(r)) for y, r in zip(labels, right, strict=True)]
    return [100 * sum(r for y, r in found if y == c) / sum(y == c for y, _ in found) for c in range(classes)]


@pytest.mark.parametrize(("method", "scale"), [("slca", 0.0), ("coma", 0.0), ("cofima", 0.001)])
def test_a_single_new_class_is_learnt_and_old_ones_are_still_predicted(
    method: str, scale: float, tiny
) -> None:
    stream = tiny.stream((3, 1), per_class=20)
    train = {"epochs": 15, "lr": 0.1, "backbone_lr_scale": scale}
    options = {"align": {"epochs": 5, "samples_per_class": 64, "lr": 0.003}}
    made = tiny.model(tiny.config(method, train=train, options=options), stream).method
    for task in stream:
        made.learn(task)
    with torch.inference_mode():
        found = accuracy_by_class(made, stream, 4)
    assert found[3] > 50
    assert min(found[:3]) > 30
    assert sum(found[:3]) / 3 > 60


def test_without_gaussians_a_single_new_class_is_learnt_too(tiny) -> None:
    made, stream = learned(tiny, "vit_test", (3, 1), train={"epochs": 10})
    with torch.inference_mode():
        assert accuracy_by_class(made, stream, 4)[3] > 25
