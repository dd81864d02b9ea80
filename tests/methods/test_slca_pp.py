"""SLCA++: the symmetric loss by its definition, LoRA unless told otherwise, and SLCA as its limit."""

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot, softmax

from cofima import methods
from cofima.training.options import LoraOptions, TrainOptions


def learned(tiny, method: str, network: str = "vit_test", **more):
    stream = tiny.stream((2, 1, 2), per_class=6)
    model = tiny.model(
        tiny.config(method, network, train={"epochs": 2} | more.pop("train", {}), **more), stream
    )
    for task in stream:
        model.method.learn(task)
    return model.method


def test_the_loss_is_its_definition() -> None:
    """Both sums are written out over all classes, with -4 in place of log 0."""
    made = methods.build("slca_pp", {"forward_weight": 0.5, "reverse_weight": 0.3})
    rng = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(7, 5, generator=rng), torch.randint(5, (7,), generator=rng)
    label = one_hot(labels, 5).float()
    predicted = softmax(logits, dim=1)
    forward = -(label * predicted.log()).sum(1).mean()
    reverse = -(predicted * label.log().clamp(min=-4)).sum(1).mean()
    torch.testing.assert_close(made.criterion(logits, labels), 0.5 * forward + 0.3 * reverse)


def test_the_exchanged_part_is_bounded_and_does_not_pull_at_hopeless_images() -> None:
    made = methods.build("slca_pp", {"forward_weight": 0.0})
    logits = torch.tensor([[60.0, 0.0], [0.0, 60.0]], requires_grad=True)
    value = made.criterion(logits, torch.tensor([1, 1]))
    assert value.item() == pytest.approx((4 + 0) / 2)
    assert torch.autograd.grad(value, logits)[0].abs().max() < 1e-6


@pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
def test_without_both_parts_it_is_slca(network: str, tiny, same_bits) -> None:
    plain = learned(tiny, "slca", network)
    limit = learned(tiny, "slca_pp", network, options={"reverse_weight": 0.0}, train={"lora": {"rank": 0}})
    same_bits(limit.net.state_dict(), plain.net.state_dict())
    same_bits(limit.state(), plain.state())


def test_it_is_slca_with_lora_and_another_loss(tiny, same_bits) -> None:
    made = learned(tiny, "slca_pp", options={"reverse_weight": 0.0})
    same_bits(made.state(), learned(tiny, "slca", train={"lora": {"rank": 4, "alpha": 3.2}}).state())
    other = learned(tiny, "slca_pp")
    assert not torch.equal(other.net.head.blocks[0].weight, made.net.head.blocks[0].weight)


def test_lora_is_its_default_and_can_be_changed_or_left_out() -> None:
    kind = methods.find("slca_pp")

    def options(**given) -> LoraOptions:
        return kind.lora_options(TrainOptions(lora=LoraOptions(**given)))

    assert options() == LoraOptions(rank=4, alpha=3.2)
    assert options().scale == pytest.approx(0.8)
    assert options(rank=8).scale == pytest.approx(0.4)
    assert options(rank=8, alpha=8, layers="attention") == LoraOptions(rank=8, alpha=8, layers="attention")
    assert options(rank=0).rank == 0


def test_more_images_of_known_classes_meet_the_same_loss(tiny) -> None:
    made = learned(tiny, "slca_pp", options={"reverse_weight": 2.0})
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    made.net.eval()
    batch = tiny.batch(images, labels)
    logits = made.net(images)
    expected = cross_entropy(logits, labels) + 2 * made.reverse(logits, labels)
    torch.testing.assert_close(made._refine_loss(batch), expected)
