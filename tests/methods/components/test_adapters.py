"""Adapters of a frozen transformer: results, untouched weights, refusals."""

import copy

import pytest
import timm
import torch
from torch.nn.functional import cosine_similarity

from cofima.methods.components.adapters import Adapt, Prompt, ScaleShift, adapt, insert, unsuited
from cofima.models.head import CosineHead
from cofima.weights import snapshot

HOW = Adapt(epochs=3, batch_size=8, width=4, tokens=3)
every_petl = pytest.mark.parametrize("petl", ["adapter", "ssf", "vpt"])


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=drawn(7))


def shaken(inserted) -> None:
    """Move what was inserted away from where it starts."""
    chance = drawn(3)
    for one in inserted:
        for value in one.parameters():
            value.data += 0.3 * torch.randn(value.shape, generator=chance)


def by_hand(vit, x, within):
    """Run timm's transformer block by block, with ``within(block, tokens)`` in place of the block."""
    x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x))))
    for block in vit.blocks:
        x = within(block, x)
    return vit.forward_head(vit.norm(x))


@every_petl
def test_all_names_stay_and_new_ones_join(petl: str, tiny) -> None:
    vit = tiny.net().backbone
    before = snapshot(vit)
    inserted = insert(vit, petl, HOW, drawn())
    after = vit.state_dict()
    assert list(before) == [key for key in after if key in before]
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(f".{petl}." in key for key in after.keys() - before.keys())
    assert len(inserted) == (2 if petl != "ssf" else 1 + 2 * 6 + 1)
    assert not any(value.requires_grad for value in vit.parameters())


def test_adapters_start_as_nothing_and_add_beside_the_mlp(tiny) -> None:
    vit = tiny.net().backbone.eval()
    before = vit(images())
    inserted = insert(vit, "adapter", HOW, drawn())
    assert torch.equal(vit(images()), before)
    shaken(inserted)

    def within(block, x):
        a = block.adapter
        x = x + block.attn(block.norm1(x))
        beside = torch.relu(x @ a.down.weight.T + a.down.bias) @ a.up.weight.T + a.up.bias
        return x + block.mlp(block.norm2(x)) + 0.1 * beside

    torch.testing.assert_close(vit(images()), by_hand(vit, images(), within))
    assert not torch.allclose(vit(images()), before, atol=1e-3)


def test_prompts_join_each_block_and_leave_it(tiny) -> None:
    vit = tiny.net().backbone.eval()
    shaken(insert(vit, "vpt", HOW, drawn()))
    tokens = []

    def within(block, x):
        tokens.append(x.shape[1])
        own = block.vpt.tokens.expand(len(x), -1, -1)
        joined = torch.cat([x, own], 1)
        joined = joined + block.attn(block.norm1(joined))
        joined = joined + block.mlp(block.norm2(joined))
        return joined[:, : x.shape[1]]

    torch.testing.assert_close(vit(images()), by_hand(vit, images(), within))
    assert tokens == [5, 5]  # a class token and four patches
    assert all(isinstance(block.vpt, Prompt) and len(block.vpt.tokens) == 3 for block in vit.blocks)


def test_scale_and_shift_are_those_of_scaled_weights(tiny) -> None:
    """After a linear map they can be written into its weights, which is another way to compute them."""
    vit = tiny.net().backbone.eval()
    plain = copy.deepcopy(vit)
    shaken(insert(vit, "ssf", HOW, drawn()))
    changed = 0
    for (_, one), (_, other) in zip(
        [(n, m) for n, m in vit.named_modules() if hasattr(m, "ssf")],
        [(n, m) for n, m in plain.named_modules() if hasattr(m, "weight")],
        strict=True,
    ):
        scale, shift = one.ssf.scale.data, one.ssf.shift.data
        other.weight.data = other.weight.data * scale.view(-1, *[1] * (other.weight.ndim - 1))
        other.bias.data = other.bias.data * scale + shift
        changed += 1
    assert changed == 14
    torch.testing.assert_close(vit(images()), plain(images()), rtol=1e-4, atol=1e-4)


def test_scale_and_shift_start_close_to_nothing(tiny) -> None:
    inserted = insert(tiny.net().backbone, "ssf", HOW, drawn())
    scales = torch.cat([one.scale for one in inserted if isinstance(one, ScaleShift)])
    shifts = torch.cat([one.shift for one in inserted if isinstance(one, ScaleShift)])
    assert float(scales.mean()) == pytest.approx(1, abs=0.01)
    assert float(shifts.mean()) == pytest.approx(0, abs=0.01)
    assert float(scales.std()) == pytest.approx(0.02, rel=0.2)
    assert float(shifts.std()) == pytest.approx(0.02, rel=0.2)


@every_petl
def test_only_what_was_inserted_is_trained(petl: str, tiny, same_bits) -> None:
    net, stream = tiny.net(), tiny.stream((3,))
    before = snapshot(net.backbone)
    inserted = insert(net.backbone, petl, HOW, drawn())
    fresh = snapshot(net.backbone)
    assert adapt(net.backbone, 16, inserted, stream[0].train, HOW, tiny.context())
    after = snapshot(net.backbone)
    same_bits({key: after[key] for key in before}, before)
    trained = [key for key in after if key not in before and not key.endswith(".on")]
    assert all(not torch.equal(after[key], fresh[key]) for key in trained)
    assert not any(value.requires_grad or value.grad is not None for value in net.parameters())
    assert not net.backbone.training


@every_petl
def test_training_lowers_the_loss(petl: str, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from cofima.methods.components import adapters as module

    losses = []
    real = module.cross_entropy
    monkeypatch.setattr(module, "cross_entropy", lambda *a: losses.append(real(*a)) or losses[-1])
    how = HOW.model_copy(update={"epochs": 20, "lr": 0.02, "dropout": 0.0})
    net, stream = tiny.net(), tiny.stream((3,))
    inserted = insert(net.backbone, petl, how, drawn())
    adapt(net.backbone, 16, inserted, stream[0].train, how, tiny.context())
    assert len(losses) == 20 * 5  # 36 images in batches of 8
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_the_rate_falls_along_a_cosine_and_is_one_for_all(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD,
        "step",
        lambda self, *a: (rates.append([g["lr"] for g in self.param_groups]), step(self, *a))[1],
    )
    how = Adapt(epochs=4, batch_size=64)
    net = tiny.net()
    inserted = insert(net.backbone, "adapter", how, drawn())
    adapt(net.backbone, 16, inserted, tiny.stream((2,))[0].train, how, tiny.context())
    expected = [0.01 * (1 + torch.cos(torch.tensor(torch.pi * epoch / 4))) / 2 for epoch in range(4)]
    assert rates == [[pytest.approx(float(rate), rel=1e-5)] * 2 for rate in expected]


@every_petl
def test_what_is_switched_off_changes_nothing(petl: str, tiny) -> None:
    net = tiny.net()
    before = net.backbone.eval()(images())
    inserted = insert(net.backbone, petl, HOW, drawn())
    shaken(inserted)
    assert not torch.allclose(net.backbone(images()), before, atol=1e-3)
    assert not adapt(net.backbone, 16, inserted, tiny.stream((1,))[0].train, HOW, tiny.context())
    assert torch.equal(net.backbone(images()), before)


@every_petl
def test_a_copy_has_its_own(petl: str, tiny) -> None:
    vit = tiny.net().backbone.eval()
    inserted = insert(vit, petl, HOW, drawn())
    twin = copy.deepcopy(vit)
    shaken(inserted)
    fresh = tiny.net().backbone.eval()
    insert(fresh, petl, HOW, drawn())
    assert torch.equal(twin(images()), fresh(images()))
    assert not torch.allclose(twin(images()), vit(images()), atol=1e-3)


@every_petl
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_small_patch14_dinov2"]
)
def test_transformers_of_timm_are_taken_as_they_are(petl: str, name: str) -> None:
    options = {"img_size": 28} if "dinov2" in name else {"img_size": 32}
    vit = timm.create_model(name, num_classes=0, depth=2, **options).eval()
    side = next(iter(options.values()))
    x = torch.randn(2, 3, side, side, generator=drawn())
    assert unsuited(vit, petl) is None
    before = vit(x)
    shaken(insert(vit, petl, HOW, drawn()))
    assert vit(x).shape == before.shape
    assert not torch.equal(vit(x), before)


@every_petl
@pytest.mark.parametrize("name", ["resnet_test", "vit_relpos_small_patch16_224", "mixer_s32_224"])
def test_other_networks_are_refused_with_advice(petl: str, name: str) -> None:
    with torch.device("meta"):  # nothing is computed with it
        other = timm.create_model(name, num_classes=0)
    problem = unsuited(other, petl)
    assert problem is not None
    assert f"petl={petl}" in problem
    assert type(other).__name__ in problem
    assert "options.petl=none" in problem
    assert unsuited(other, "none") is None
    assert insert(other, "none", HOW, drawn()) == []


def test_the_cosine_head(tiny) -> None:
    head = CosineHead(16, 4, drawn())
    features = torch.randn(7, 16, generator=drawn(1))
    expected = cosine_similarity(features[:, None], head.weight[None], dim=2)
    torch.testing.assert_close(head(features), expected)
    head.scale.data.fill_(3.0)
    torch.testing.assert_close(head(features), 3 * expected)
