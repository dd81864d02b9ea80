"""LwF: local cross-entropy on the new classes, the teacher's answers on the old ones."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.methods.base import Method
from cofima.training.loop import plain_batches


class Base(Method):
    """Fine-tuning with the local loss, all rows of the head trainable."""

    frozen_old_heads = False


def learned(tiny, method: str, sizes=(2, 3, 1), network="vit_test", base=None, **options):
    stream = tiny.stream(sizes, per_class=8)
    made = tiny.model(tiny.config(method, network, options=options, train={"epochs": 2}), stream).method
    if base is not None:
        plain = base()
        plain.setup(made.net, made.context)
        made = plain
    for task in stream:
        made.learn(task)
    return made, stream


@pytest.mark.parametrize(("method", "network"), [("lwf", "resnet_test"), ("ewc", "vit_test")])
def test_without_weight_it_is_its_base(method: str, network: str, tiny, same_bits) -> None:
    made, _ = learned(tiny, method, network=network, lamb=0)
    base, _ = learned(tiny, method, network=network, base=Base)
    same_bits(made.net.state_dict(), base.net.state_dict())
    held, _ = learned(tiny, method, network=network, lamb=1)
    assert not torch.equal(held.net.head.flat()["weight"], base.net.head.flat()["weight"])


def test_old_rows_move(tiny) -> None:
    stream = tiny.stream((2, 2))
    made = tiny.model(tiny.config("lwf"), stream).method
    made.learn(stream[0])
    before = made.net.head.blocks[0].weight.clone()
    made.learn(stream[1])
    assert not torch.allclose(before, made.net.head.blocks[0].weight, rtol=0.01)


def test_the_loss_by_hand_and_a_teacher_that_never_changes(tiny, same_bits, monkeypatch) -> None:
    stream = tiny.stream((3, 2))
    made = tiny.model(
        tiny.config("lwf", "resnet_test", options={"lamb": 3.0, "temperature": 2.0}), stream
    ).method
    made.learn(stream[0])
    after_one = copy.deepcopy(made.net)
    seen = []

    def look(self, _) -> None:
        same_bits(self.teacher.state_dict(), after_one.state_dict())
        assert not self.teacher.training
        assert not any(p.requires_grad for p in self.teacher.parameters())
        if not seen:
            self.net.eval()
            images, labels = next(plain_batches(stream[1].train, self.context, "x"))
            z, old = self.net(images), after_one.eval()(images)
            kd = -(torch.softmax(old / 2, 1) * torch.log_softmax(z[:, :3] / 2, 1)).sum(1).mean()
            expected = cross_entropy(z[:, 3:], labels - 3) + 3 * kd
            torch.testing.assert_close(self.loss(tiny.batch(images, labels)), expected)
            self.net.train()
        seen.append(1)

    monkeypatch.setattr(type(made), "after_step", look)
    made.learn(stream[1])
    assert seen
    assert not hasattr(made, "teacher")  # freed
    assert made.state() == {}


def test_it_answers_on_old_classes_more_like_before(tiny) -> None:
    def drift(lamb: float) -> float:
        stream = tiny.stream((3, 3))
        train = {"epochs": 4, "lr": 0.02}
        made = tiny.model(tiny.config("lwf", options={"lamb": lamb}, train=train), stream).method
        made.learn(stream[0])
        images, _ = next(plain_batches(stream[1].train, made.context, "x"))
        before = made.net(images).detach().softmax(1)
        made.learn(stream[1])
        return float((made.net(images).detach()[:, :3].softmax(1) - before).abs().mean())

    assert drift(10) < 0.5 * drift(0)
