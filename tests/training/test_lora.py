"""LoRA: the product by its definition, the gradients of the factors, and everything that stays as it was."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from cofima import methods
from cofima.core.errors import CofimaError
from cofima.experiment.config import check
from cofima.experiment.launch import launch
from cofima.models.net import Net
from cofima.training import loop
from cofima.training.lora import LowRank, adapted, low_rank
from cofima.training.options import LoraOptions
from cofima.weights.ops import snapshot

networks = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
TRAIN = {"epochs": 2, "batch_size": 8, "backbone_lr_scale": 1.0, "lora": {"rank": 2, "alpha": 3.0}}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moved(layer: nn.Module, options: LoraOptions) -> LowRank:
    """Return the factors of a layer, set to random numbers and written."""
    factors = LowRank([layer.weight], options, rng())
    with torch.no_grad():
        factors.up[0].normal_(generator=rng(1))
    factors.write_weights()
    return factors


# --- one layer -------------------------------------------------------------------------------------


def test_a_linear_layer_is_the_old_one_plus_the_product() -> None:
    layer = nn.Linear(7, 5).double()
    old = copy.deepcopy(layer)
    factors = moved(layer, LoraOptions(rank=3, alpha=1.5))
    x = torch.randn(4, 7, dtype=torch.float64)
    expected = old(x) + 0.5 * linear(linear(x, factors.down[0]), factors.up[0])
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.bias, old.bias)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_the_old_one_plus_two_convolutions(layout: torch.memory_format) -> None:
    """The first has the size, stride, padding and dilation of the layer, the second has size 1."""
    layer = (
        nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 2), dilation=(1, 2)).double().to(memory_format=layout)
    )
    old = copy.deepcopy(layer)
    factors = moved(layer, LoraOptions(rank=2, alpha=5.0))
    x = torch.randn(3, 4, 9, 8, dtype=torch.float64)
    inner = conv2d(x, factors.down[0].view(2, 4, 3, 2), None, 2, (1, 2), (1, 2))
    expected = old(x) + 2.5 * conv2d(inner, factors.up[0].view(6, 2, 1, 1))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_factors_are_those_of_autograd() -> None:
    layer = nn.Conv2d(3, 5, 3, padding=1).double()
    start = layer.weight.detach().clone()
    factors = moved(layer, LoraOptions(rank=2, alpha=0.6))
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    layer(x).pow(3).sum().backward()
    factors.take_gradients()
    assert layer.weight.grad is None  # nothing accumulates
    down, up = (factor.detach().clone().requires_grad_() for factor in (factors.down[0], factors.up[0]))
    weight = start + 0.3 * (up @ down).view_as(start)
    loss = conv2d(x, weight, layer.bias.detach(), padding=1).pow(3).sum()
    for factor, expected in zip(
        (factors.down[0], factors.up[0]), torch.autograd.grad(loss, (down, up)), strict=True
    ):
        torch.testing.assert_close(factor.grad, expected, rtol=1e-11, atol=1e-11)


def test_at_full_rank_a_step_goes_where_the_weight_itself_would() -> None:
    """With a square A whose rows are orthonormal, the first step of B is that of W."""
    layer = nn.Linear(4, 6, bias=False).double()
    whole = copy.deepcopy(layer)
    factors = LowRank([layer.weight], LoraOptions(rank=4), rng())
    with torch.no_grad():
        factors.down[0].copy_(torch.linalg.qr(factors.down[0])[0])
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (factors.up[0], whole.weight)]
    x = torch.randn(5, 4, dtype=torch.float64)
    for net in (layer, whole):
        net(x).square().sum().backward()
    factors.take_gradients()
    assert not factors.down[0].grad.any()  # as B is 0
    for optimizer in optimizers:
        optimizer.step()
    factors.write_weights()
    torch.testing.assert_close(layer.weight, whole.weight, rtol=1e-12, atol=1e-12)


def test_the_start_changes_nothing_and_a_loss_that_does_not_reach_a_layer_neither() -> None:
    layer = nn.Linear(7, 5)
    old = layer.weight.detach().clone()
    factors = LowRank([layer.weight], LoraOptions(rank=3), rng())
    factors.take_gradients()
    assert all(factor.grad is None for factor in factors.parameters())
    factors.write_weights()
    assert torch.equal(layer.weight, old)
    assert factors.down[0].abs().max() <= 7**-0.5
    assert factors.down[0].any()
    assert not factors.up[0].any()


# --- a backbone ------------------------------------------------------------------------------------


def test_layers_are_linear_ones_and_convolutions_of_all_channels() -> None:
    net = nn.Sequential()
    net.stem, net.depthwise = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
    net.norm, net.attn = nn.BatchNorm2d(8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    net.shared = net.attn[0]
    every = adapted(net, LoraOptions(rank=1))
    assert {id(weight) for weight in every} == {id(net.stem.weight), id(net.attn[0].weight)}
    assert [id(weight) for weight in adapted(net, LoraOptions(layers="attention"))] == [
        id(net.attn[0].weight)
    ]


def test_attention_layers_of_a_transformer(tiny) -> None:
    backbone = tiny.net().backbone
    names = {id(value): name for name, value in backbone.named_parameters()}
    found = {names[id(weight)] for weight in adapted(backbone, LoraOptions(layers="attention"))}
    assert found == {f"blocks.{n}.attn.{part}.weight" for n in range(2) for part in ("qkv", "proj")}


@networks
def test_only_the_layers_move_and_all_names_stay(network: str, tiny) -> None:
    stream = tiny.stream((2, 2), per_class=6)
    method = tiny.model(tiny.config("seq_ft", network, train=TRAIN), stream).method
    for norm in loop.batchnorm_layers(method.net):
        nn.init.ones_(norm.weight)  # fresh ones are 0 at the end of a residual branch, which then never moves
    seen: set[tuple[str, ...]] = set()
    whole = type(method).after_step
    method.after_step = lambda batch: (seen.add(tuple(method.net.state_dict())), whole(method, batch))[1]
    names = {id(value): name for name, value in method.net.backbone.named_parameters()}
    free = {names[id(weight)] for weight in adapted(method.net.backbone, LoraOptions())}
    for task in stream:
        before = snapshot(method.net.backbone)
        method.learn(task)
        assert tuple(method.net.state_dict()) in seen
        after = method.net.backbone.state_dict()
        assert after.keys() == before.keys()
        for key, value in before.items():  # statistics of batch normalization included
            assert torch.equal(after[key], value) == (key not in free), key
        for key in free:
            change = (after[key] - before[key]).flatten(1).double()
            rounding = 1e-6 * float(before[key].norm())
            assert torch.linalg.matrix_rank(change, atol=rounding) <= 2 < min(change.shape), key
        assert all(weight.requires_grad for weight in method.net.backbone.parameters())
    assert len(seen) == 2  # the head grew once


def test_factors_learn_at_the_rate_of_the_backbone_and_decay(tiny) -> None:
    net, context = tiny.net(sizes=(2,)), tiny.context({"lr": 0.5, "backbone_lr_scale": 0.1})
    with low_rank(net.backbone, LoraOptions(rank=2), rng()) as factors:
        slow, fast = loop.make_optimizer(net, context.train, factors).param_groups
    assert [id(p) for p in slow["params"]] == [id(p) for p in factors.parameters()]
    assert (slow["lr"], slow["weight_decay"], fast["lr"]) == (0.05, context.train.weight_decay, 0.5)


@networks
def test_a_rank_of_zero_is_no_lora(network: str, tiny, same_bits) -> None:
    stream = tiny.stream((2, 2), per_class=6)
    made = []
    for lora in ({}, {"rank": 0, "alpha": 2.0, "layers": "attention"}):
        method = tiny.model(tiny.config("seq_ft", network, train=TRAIN | {"lora": lora}), stream).method
        method.learn(stream[0])
        made.append(method.net.state_dict())
    same_bits(*made)


def still(method: methods.Method, task) -> bool:
    before = snapshot(method.net.backbone)
    method.learn(task)
    return all(torch.equal(value, before[key]) for key, value in method.net.backbone.state_dict().items())


@networks
def test_a_frozen_backbone_stays_frozen(network: str, tiny) -> None:
    stream = tiny.stream((2, 1, 2), per_class=6)
    slow = tiny.model(tiny.config("slca", network, train=TRAIN | {"backbone_lr_scale": 0.0}), stream).method
    assert all(still(slow, task) for task in stream)
    frozen = TRAIN | {"freeze_backbone_on_single_class": True}
    single = tiny.model(tiny.config("slca", network, train=frozen), stream).method
    assert [still(single, task) for task in stream] == [False, True, False]


# --- methods ---------------------------------------------------------------------------------------


def test_a_moving_average_is_one_of_products(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tiny.stream((2,), per_class=6)
    method = tiny.model(tiny.config("ema", train=TRAIN, options={"decay": 0.5}), stream).method
    key = "blocks.0.attn.qkv.weight"
    expected = method.net.backbone.state_dict()[key].clone()
    whole = type(method).after_step

    def after_step(batch) -> None:
        expected.lerp_(method.net.backbone.state_dict()[key], 0.5)
        whole(method, batch)

    monkeypatch.setattr(method, "after_step", after_step)
    start = expected.clone()
    method.learn(stream[0])
    assert torch.equal(method.net.backbone.state_dict()[key], expected)
    assert not torch.equal(expected, start)


def test_a_penalty_holds_the_product(tiny) -> None:
    """However strong the pull, it is one on weights: they stay nearer to where they were."""
    stream = tiny.stream((2, 2), per_class=6)
    far = []
    for lamb in (0.0, 1e4):
        method = tiny.model(tiny.config("ewc", train=TRAIN, options={"lamb": lamb}), stream).method
        method.learn(stream[0])
        before = snapshot(method.net.backbone)
        fisher = {k.removeprefix("fisher.backbone."): v for k, v in method.state().items() if "backbone" in k}
        method.learn(stream[1])
        after = method.net.backbone.state_dict()
        far.append(sum(float((fisher[k] * (after[k] - before[k]) ** 2).sum()) for k in fisher))
    assert 0 < far[1] < 0.5 * far[0]


def test_fisher_information_is_of_the_product(tiny, same_bits) -> None:
    """A model whose weights are loaded from the file of another has the same."""
    stream = tiny.stream((2, 2), per_class=6)
    first, second = (tiny.model(tiny.config("cofima", train=TRAIN), stream).method for _ in range(2))
    first.learn(stream[0])
    second.learn(stream[0], train=lambda task: second.net.load_state_dict(first.net.state_dict()))
    same_bits(first.state(), second.state())


def test_more_images_of_known_classes_move_the_layers_alone(tiny) -> None:
    stream = tiny.stream((3,), per_class=6)
    method = tiny.model(tiny.config("slca", train=TRAIN), stream).method
    method.learn(stream[0])
    before = snapshot(method.net.backbone)
    method.learn(replace(stream[0], index=1, classes=range(3, 3), known=(0, 1, 2)))
    after = method.net.backbone.state_dict()
    changed = {key for key, value in before.items() if not torch.equal(after[key], value)}
    names = {id(value): name for name, value in method.net.backbone.named_parameters()}
    assert changed == {names[id(weight)] for weight in adapted(method.net.backbone, LoraOptions())}


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prototype", "ranpac", "l2p", "dual_prompt"])
def test_a_method_that_does_not_train_the_backbone_refuses(name: str) -> None:
    with pytest.raises(CofimaError, match=r"train\.lora\.rank = 4: .* does not train the backbone"):
        check({"method": name, "train": {"lora": {"rank": 4}}})
    check({"method": name, "train": {"lora": {"rank": 0}}})


def test_a_method_with_its_own_optimizer_refuses(tiny) -> None:
    class Own(methods.find("seq_ft")):
        def optimizer(self):
            return torch.optim.Adam(self.net.parameters())

    method, context = Own(), tiny.context({"lora": {"rank": 2}})
    with pytest.raises(CofimaError, match="optimizer of its own"):
        method.setup(tiny.net(), context)
    method.setup(tiny.net(), tiny.context())
    with pytest.raises(CofimaError, match="optimizer of its own"):
        method.learn(tiny.stream((2,))[0], context=context)


def test_attention_of_a_network_without_any_is_refused_before_any_work(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config("seq_ft", "resnet_test", train={"lora": {"rank": 2, "layers": "attention"}})
    monkeypatch.setattr("cofima.data.datasets.load", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(CofimaError, match="a ResNet, has no attention layer; use"):
        launch(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_with_nothing_to_adapt_is_refused(tiny) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, images: Tensor) -> Tensor:
            return self.norm(images.mean((2, 3)))

    with pytest.raises(CofimaError, match="nothing would move"):
        methods.build("seq_ft").setup(Net(Flat(), 3), tiny.context({"lora": {"rank": 2}}))
