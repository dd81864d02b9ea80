"""BiC: exemplars, distillation by numbers of classes, and two numbers that take the bias out."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.core.errors import CofimaError
from cofima.methods import bic
from cofima.methods.bic import Correction, fit_correction
from cofima.methods.components.distillation import distillation
from cofima.training.loop import plain_batches


def made_for(tiny, stream, network="vit_test", train=None, **options):
    config = tiny.config("bic", network, options=options, train=train or {"epochs": 2})
    return tiny.model(config, stream).method


def taken(images) -> set[bytes]:
    return {p.numpy().tobytes() for p in images.batch(torch.arange(len(images)))[0]}


def test_the_loss_weighs_distillation_by_the_share_of_old_classes(tiny) -> None:
    stream = tiny.stream((3, 1))
    made = made_for(tiny, stream, temperature=2.0)
    made.learn(stream[0])
    teacher = copy.deepcopy(made.net)
    made.task, made.facts = stream[1], {"seconds": {}, "notes": [], "lam": None}
    made.begin(stream[1])
    with torch.no_grad():
        made.net.head.blocks[0].weight.mul_(1.5)
    pairs = plain_batches(made.training_images, made.context, "x")
    images, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
    logits = made.net(images)
    expected = 0.75 * distillation(logits[:, :3], teacher(images), 2.0) + 0.25 * cross_entropy(logits, labels)
    torch.testing.assert_close(made.loss(tiny.batch(images, labels)), expected)
    assert set(labels.tolist()) == {0, 1, 2, 3}
    assert all(p.requires_grad for p in made.net.head.parameters())


@pytest.mark.parametrize("selection", ["herding", "random"])
def test_what_is_held_out_is_balanced_and_never_trained_on(selection: str, tiny, monkeypatch) -> None:
    stream = tiny.stream((2, 2, 1), per_class=20)
    made = made_for(tiny, stream, memory_size=40, selection=selection, validation=0.2)
    trained: set[bytes] = set()
    held: set[bytes] = set()
    correct = bic.correct

    def look(net, images, *more):
        held.update(taken(images))
        assert made.training_images is made.data(made.task)
        labels = images.batch(torch.arange(len(images)))[1]
        count = round(0.2 * max(made.memory.counts().values()))
        assert torch.bincount(labels).tolist() == [count] * made.task.classes.stop
        return correct(net, images, *more)

    monkeypatch.setattr(bic, "correct", look)
    made.after_step = lambda batch: trained.update(p.numpy().tobytes() for p in batch.pixels)
    for task in stream:
        trained.clear(), held.clear()
        made.learn(task)
        assert not trained & held
        assert bool(held) == (task.index > 0)
        counts = made.memory.counts()
        quota = 40 // task.classes.stop
        assert counts == dict.fromkeys(
            range(task.classes.stop), min(quota, len(task.train) // len(task.classes))
        )
        assert sum(counts.values()) <= 40


def test_old_exemplars_are_the_first_of_those_before(tiny) -> None:
    stream = tiny.stream((2, 2), per_class=20)
    made = made_for(tiny, stream, memory_size=20)
    made.learn(stream[0])
    before = made.memory
    made.learn(stream[1])
    for label in (0, 1):
        old, new = (m.select(m.labels == label).batch(torch.arange(5))[0] for m in (before, made.memory))
        assert torch.equal(old, new)


def test_every_task_s_correction_acts_on_its_own_classes(tiny, monkeypatch) -> None:
    stream = tiny.stream((2, 2, 2), per_class=20)
    made = made_for(tiny, stream, memory_size=40)
    raw, correct = {}, bic.correct

    def look(net, images, *more):
        raw["net"] = copy.deepcopy(net)
        raw["fitted"] = correct(net, images, *more)
        return raw["fitted"]

    monkeypatch.setattr(bic, "correct", look)
    images = made.context.view.test(stream[0].test.batch(torch.arange(5))[0])
    for task in stream:
        made.learn(task)
        if task.index == 0:
            assert not raw
            continue
        alpha, beta = raw["fitted"]
        assert (alpha, beta) != (1, 0)
        with torch.no_grad():
            z, found = raw["net"](images), made.predict(images)
        start = task.classes.start
        torch.testing.assert_close(found[:, start:], alpha * z[:, start:] + beta)
        assert torch.equal(found[:, :start], z[:, :start])  # these carry the corrections of their own tasks
        assert any(f"alpha {alpha:.3f}" in note for note in made.facts["notes"])


def test_the_teacher_is_the_corrected_network_and_goes(tiny, same_bits) -> None:
    stream = tiny.stream((2, 2, 2))
    made = made_for(tiny, stream)
    for task in stream[:2]:
        made.learn(task)
    corrected = copy.deepcopy(made.net.state_dict())
    teachers = []
    made.after_step = lambda _: teachers.append(copy.deepcopy(made.teacher.state_dict()))
    made.learn(stream[2])
    same_bits(teachers[0], corrected)
    same_bits(teachers[-1], corrected)
    assert not hasattr(made, "teacher")


def test_classes_with_a_single_image_are_learnt(tiny) -> None:
    stream = tiny.stream((2, 2), per_class=6)
    single = [
        task.__class__(
            task.index,
            task.classes,
            task.names,
            task.train.select(torch.stack([(task.train.labels == c).nonzero()[0, 0] for c in task.classes])),
            task.test,
        )
        for task in stream
    ]
    made = made_for(tiny, stream, memory_size=8)
    for task in single:
        made.learn(task)
    assert made.memory.counts() == {0: 1, 1: 1, 2: 1, 3: 1}


def test_a_memory_without_two_images_of_each_class_is_refused(tiny) -> None:
    with pytest.raises(CofimaError, match=r"options\.memory_size = 11: too small for 6 classes"):
        tiny.model(tiny.config("bic", options={"memory_size": 11}), tiny.stream((2, 2, 2)))


def test_a_planted_bias_is_recovered() -> None:
    """Labels are drawn from the softmax of corrected logits: their alpha and beta must come back."""
    rng = torch.Generator().manual_seed(0)
    logits, alpha, beta = 2 * torch.randn(20_000, 6, generator=rng), 0.6, -1.2
    true = torch.cat([logits[:, :4], alpha * logits[:, 4:] + beta], 1)
    labels = torch.multinomial(true.softmax(1), 1, generator=rng).flatten()
    found = fit_correction(logits, labels, 4, Correction(epochs=10), 128, rng)
    assert found == pytest.approx((alpha, beta), abs=0.06)


def test_the_default_fit_ends_at_the_minimum_and_none_is_the_identity() -> None:
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 6, generator=rng)
    labels = (logits + torch.randn(200, 6, generator=rng)).argmax(1)
    shifted = torch.cat([logits[:, :3], 2 * logits[:, 3:] + 1.5], 1)
    alpha, beta = fit_correction(shifted, labels, 3, Correction(), 128, rng)

    def loss(a: float, b: float) -> float:
        return cross_entropy(torch.cat([shifted[:, :3], a * shifted[:, 3:] + b], 1), labels).item()

    grid = min(loss(a / 20, b / 20) for a in range(0, 41) for b in range(-60, 41))
    assert loss(alpha, beta) < grid + 2e-3 < loss(1, 0)
    assert fit_correction(shifted, labels, 3, Correction(epochs=0), 128, rng) == (1, 0)
    assert fit_correction(shifted[:0], labels[:0], 3, Correction(), 128, rng) == (1, 0)
