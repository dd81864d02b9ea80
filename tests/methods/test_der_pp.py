"""DER++: replay with the logits and with the labels that images had."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.methods.base import Method


class Base(Method):
    """Fine-tuning with cross-entropy over all classes seen, all rows trainable."""

    frozen_old_heads = False

    def loss(self, batch):
        return cross_entropy(self.net(batch.images), batch.labels)


def made_for(tiny, stream, network="vit_test", train=None, **options):
    config = tiny.config("der_pp", network, options=options, train=train or {"epochs": 2})
    return tiny.model(config, stream).method


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_without_weights_it_is_its_base(network: str, tiny, same_bits) -> None:
    stream = tiny.stream((2, 1, 3))
    made = made_for(tiny, stream, network, alpha=0, beta=0)
    base, other = Base(), made_for(tiny, stream, network)
    base.setup(other.net, other.context)
    for task in stream:
        made.learn(task)
        base.learn(task)
        same_bits(made.net.state_dict(), base.net.state_dict())
    replayed = made_for(tiny, stream, network)
    for task in stream:
        replayed.learn(task)
    assert not torch.equal(replayed.net.head.flat()["weight"], base.net.head.flat()["weight"])


def test_logits_are_kept_as_they_were_before_the_step(tiny) -> None:
    """With no augmentation and one pass, each image's logits are those of the network that it met."""
    stream = tiny.stream((2, 3))
    made = made_for(tiny, stream, memory_size=500, alpha=0, beta=0, train={"epochs": 1})
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []
    loss = made.loss

    def look(batch) -> torch.Tensor:
        with torch.no_grad():
            expected.append((batch.pixels, made.net(made.context.view.test(batch.pixels))))
        return loss(batch)

    made.loss = look
    for task in stream:
        made.learn(task)
    pixels = torch.cat([p for p, _ in expected])
    kept = made.state()
    assert torch.equal(kept["memory.pixels"], pixels)  # un-augmented, in order of arrival
    at = 0
    for _, logits in expected:
        rows = slice(at, at + len(logits))
        assert kept["memory.known"][rows].tolist() == [logits.shape[1]] * len(logits)
        torch.testing.assert_close(kept["memory.logits"][rows, : logits.shape[1]], logits)
        assert not kept["memory.logits"][rows, logits.shape[1] :].any()
        at += len(logits)
    assert set(kept["memory.known"].tolist()) == {2, 5}


def test_the_loss_by_hand(tiny, monkeypatch) -> None:
    stream = tiny.stream((2, 2))
    made = made_for(tiny, stream, alpha=0.3, beta=0.5, memory_size=6)
    made.learn(stream[0])
    made.task, made.facts = stream[1], {"seconds": {}, "notes": [], "lam": None}
    made.begin(stream[1])
    drawn = []
    draw = made.memory.draw
    monkeypatch.setattr(made.memory, "draw", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    pixels, labels = stream[1].train.batch(torch.arange(4))
    seen = made.context.view.test
    loss = made.loss(tiny.batch(seen(pixels), labels))
    (x1, _, z1, k1), (x2, y2, _, _) = drawn
    assert len(x1) == len(x2) == 4
    assert not torch.equal(x1, x2)  # two draws
    assert k1.tolist() == [2] * 4
    # the blobs are not cropped or mirrored in tests, so training views are test views
    expected = cross_entropy(made.net(seen(pixels)), labels)
    expected = expected + 0.3 * (made.net(seen(x1))[:, :2] - z1).square().mean()
    expected = expected + 0.5 * cross_entropy(made.net(seen(x2)), y2)
    torch.testing.assert_close(loss, expected)


def test_a_first_class_alone_is_remembered(tiny) -> None:
    stream = tiny.stream((1, 2))
    made = made_for(tiny, stream, memory_size=100)
    made.learn(stream[0])
    assert made.memory.seen == len(stream[0].train) == len(made.memory)
    made.learn(stream[1])
    assert set(made.memory.labels[: len(made.memory)].tolist()) == {0, 1, 2}


def test_replay_keeps_old_classes_alive(tiny) -> None:
    def old_accuracy(**options) -> float:
        stream = tiny.stream((2, 2), per_class=20)
        made = made_for(
            tiny,
            stream,
            memory_size=40,
            train={"epochs": 12, "lr": 0.02, "backbone_lr_scale": 0.05},
            **options,
        )
        for task in stream:
            made.learn(task)
        pixels, labels = stream[0].train.batch(torch.arange(len(stream[0].train)))
        with torch.no_grad():
            return float((made.predict(made.context.view.test(pixels)).argmax(1) == labels).float().mean())

    assert old_accuracy() > 0.5 > 0.2 > old_accuracy(alpha=0, beta=0)
