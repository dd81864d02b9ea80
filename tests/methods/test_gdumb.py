"""GDumb: a balanced memory, and nothing else, learned anew from the first weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from cofima.core.errors import CofimaError
from cofima.models.net import Net
from cofima.training.loop import sgd


def made_for(tiny, stream, network="vit_test", **options):
    return tiny.model(tiny.config("gdumb", network, options=options, train={"epochs": 2}), stream).method


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_each_task_is_a_training_on_the_memory_from_the_first_weights(network: str, tiny, same_bits) -> None:
    stream = tiny.stream((2, 1, 2))
    made = made_for(tiny, stream, network, memory_size=11)
    for task in stream:
        made.learn(task)
        net: Net = tiny.net(network, seed=3)  # the weights before anything was learned
        generator = made.context.seeds.generator("head", task.index)
        for size in (2, 1, 2)[: task.index + 1]:
            net.grow(size, generator, freeze=False)
        sgd(net, made.memory, lambda b, n=net: cross_entropy(n(b.images), b.labels), made.context, task.index)
        same_bits(made.net.state_dict(), net.state_dict())


def test_the_memory_is_balanced_within_its_size_and_of_the_images_seen(tiny) -> None:
    stream = tiny.stream((2, 1, 3), per_class=20)
    made = made_for(tiny, stream, memory_size=17)
    for task in stream:
        made.learn(task)
        counts = list(made.memory.counts().values())
        assert len(counts) == task.classes.stop
        assert max(counts) - min(counts) <= 1
        assert sum(counts) <= 17
        assert made.state()["memory.pixels"].dtype == torch.uint8
        assert made.state()["memory.pixels"].numel() == sum(counts) * 3 * 16 * 16


def test_a_memory_too_small_is_refused_before_any_work(tiny) -> None:
    with pytest.raises(CofimaError, match=r"options\.memory_size = 5"):
        tiny.model(tiny.config("gdumb", options={"memory_size": 5}), tiny.stream((2, 2, 2)))
