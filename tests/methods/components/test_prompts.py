"""Prompts in any timm ViT: hooks equal a forward pass written out by hand, and leave nothing behind."""

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import Attention, ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from cofima.methods.components.prompts import (
    Pool,
    adam,
    mean_of_tokens,
    prefix_problem,
    prefixes,
    tokens_inserted,
    uniform,
    voted,
)
from cofima.models.vit import incompatibility

SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 3, "num_classes": 0}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"reg_tokens": 2},
    "positions of patches only": {"no_embed_class": True, "reg_tokens": 1},
    "no positions": {"pos_embed": "none"},
    "norm before the blocks": {"pre_norm": True},
    "layer scale": {"init_values": 0.3},
    "no bias": {"qkv_bias": False},
    "any size": {"dynamic_img_size": True},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())


def vit(**options: Any) -> VisionTransformer:
    """Return a small ViT in float64 whose every weight matters."""
    net = VisionTransformer(**(SHAPE | options)).double().eval()
    chance = torch.Generator().manual_seed(0)
    for weight in net.parameters():
        weight.data = torch.randn(weight.shape, generator=chance, dtype=torch.float64) * 0.5
    return net


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_attention(attention: Attention, x: Tensor, prefix: Tensor | None) -> Tensor:
    """Attend one image [tokens, width], one head and one query at a time."""
    weight, bias = attention.qkv.weight, attention.qkv.bias
    q, k, v = ((x @ weight.T) + (0 if bias is None else bias)).chunk(3, dim=1)
    if prefix is not None:
        k, v = torch.cat([prefix[0], k]), torch.cat([prefix[1], v])
    size = x.shape[1] // attention.num_heads
    rows = []
    for query in q:
        heads = []
        for head in range(attention.num_heads):
            part = slice(head * size, (head + 1) * size)
            scores = torch.stack([query[part] @ key[part] / size**0.5 for key in k])
            shares = scores.exp() / scores.exp().sum()
            heads.append(sum(share * value[part] for share, value in zip(shares, v, strict=True)))
        rows.append(torch.cat(heads))
    return attention.proj(torch.stack(rows))


def slow_tokens(net: VisionTransformer, image: Tensor, prompt: Tensor | None, by_layer: dict) -> Tensor:
    """Compute the outputs of one image, written out."""
    patches = net.patch_embed(image[None]).reshape(1, -1, net.embed_dim)[0]
    own = torch.cat([t[0] for t in (net.cls_token, net.reg_token) if t is not None])
    tokens = torch.cat([own, patches])
    if net.pos_embed is not None:
        start = len(own) if net.no_embed_class else 0
        tokens = torch.cat([tokens[:start], tokens[start:] + net.pos_embed[0]])
    if prompt is not None:
        if net.pos_embed is not None and not net.no_embed_class:
            prompt = prompt + net.pos_embed[0, 0]  # the class token's position
        tokens = torch.cat([tokens[: len(own)], prompt, tokens[len(own) :]])
    tokens = net.norm_pre(tokens)
    for layer, block in enumerate(net.blocks):
        tokens = tokens + block.ls1(slow_attention(block.attn, block.norm1(tokens), by_layer.get(layer)))
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
    return net.norm(tokens)


@every_kind
@torch.no_grad()
def test_tokens_join_the_sequence_of_their_own_image(options: dict[str, Any]) -> None:
    net, images, tokens = vit(**options), draw(3, 3, 16, 16), draw(3, 4, 12, seed=2)
    fast = mean_of_tokens(net, images, tokens)
    first = 1 + net.num_reg_tokens
    for row, image, own in zip(fast, images, tokens, strict=True):
        slow = slow_tokens(net, image, own, {})[first : first + 4].mean(0)
        torch.testing.assert_close(row, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "fused"), [*((kind, True) for kind in KINDS), ("plain", False), ("no bias", False)]
)
@torch.no_grad()
def test_prefixes_join_keys_to_keys_and_values_to_values_for_every_image(kind: str, fused: bool) -> None:
    net, images = vit(**KINDS[kind]), draw(4, 3, 16, 16)
    for block in net.blocks:
        block.attn.fused_attn = fused
    by_layer = {0: draw(4, 2, 5, 12, seed=3), 2: draw(4, 2, 1, 12, seed=4)}
    with prefixes(net, by_layer):
        fast = net(images)
    for place, image in enumerate(images):
        own = {layer: prefix[place] for layer, prefix in by_layer.items()}
        torch.testing.assert_close(fast[place], slow_tokens(net, image, None, own)[0], rtol=1e-9, atol=1e-9)
        wrong = {layer: prefix.flip(0) for layer, prefix in own.items()}  # keys and values changed places
        assert not torch.allclose(fast[place], slow_tokens(net, image, None, wrong)[0], rtol=1e-3)


@torch.no_grad()
def test_one_prefix_for_all_is_mapped_alike_in_every_half_of_the_batch() -> None:
    """A well-known slip: reshaping instead of permuting gives half of a batch (K, K), the other (V, V)."""
    net, prefix = vit(), draw(2, 5, 12)
    images = draw(1, 3, 16, 16).expand(6, -1, -1, -1)
    with prefixes(net, {1: prefix.expand(6, -1, -1, -1)}):
        features = net(images)
    slow = slow_tokens(net, images[0], None, {1: prefix})[0]
    torch.testing.assert_close(features, slow.expand(6, -1), rtol=1e-9, atol=1e-9)


@every_kind
@torch.no_grad()
def test_nothing_put_in_is_the_plain_network_bit_for_bit(options: dict[str, Any]) -> None:
    net, images = vit(**options), draw(3, 3, 16, 16)
    plain = net(images)
    with prefixes(net, {0: draw(3, 2, 0, 12), 1: draw(3, 2, 0, 12)}):
        assert torch.equal(net(images), plain)
    with tokens_inserted(net, draw(3, 0, 12)) as places:
        assert torch.equal(net(images), plain)
        assert (places.start, places.stop) == (net.num_prefix_tokens, net.num_prefix_tokens)


def hooks(net: nn.Module) -> list[object]:
    return [
        hook
        for module in net.modules()
        for kind in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in kind.values()
    ]


@torch.no_grad()
def test_the_network_is_itself_again_afterwards_even_after_an_error() -> None:
    net, images = vit(), draw(3, 3, 16, 16)
    plain, weights = net(images), copy.deepcopy(net.state_dict())
    mean_of_tokens(net, images, draw(3, 2, 12))
    with prefixes(net, {0: draw(3, 2, 2, 12)}):
        assert len(hooks(net)) == 3
        assert not torch.allclose(net(images), plain)
    with pytest.raises(RuntimeError):
        mean_of_tokens(net, images, draw(2, 2, 12))  # prompts of 2 images for 3
    with pytest.raises(RuntimeError), prefixes(net, {0: draw(2, 2, 2, 12), 1: draw(2, 2, 2, 12)}):
        net(images)
    with pytest.raises(IndexError), prefixes(net, {0: draw(3, 2, 2, 12), 7: draw(3, 2, 2, 12)}):
        pass
    assert hooks(net) == []
    assert torch.equal(net(images), plain)
    assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())


def test_gradients_reach_prompts_and_prefixes_and_are_exact() -> None:
    net, images = vit().requires_grad_(False), draw(2, 3, 16, 16)

    def outputs(tokens: Tensor, prefix: Tensor) -> Tensor:
        with prefixes(net, {1: prefix}):
            return mean_of_tokens(net, images, tokens)

    inputs = draw(2, 1, 12).requires_grad_(), draw(2, 2, 1, 12, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(outputs, inputs)


def filled(count: int = 7, width: int = 6, seed: int = 0) -> Pool:
    pool = Pool()
    pool.add(draw(count, 2, 3, seed=seed), draw(count, width, seed=seed + 1))
    return pool


def test_similarity_and_choice_equal_a_slow_loop() -> None:
    pool, query = filled(), draw(5, 6, seed=9)
    keys = pool.state()["keys"]
    similarity = pool.similarity(query)
    chosen = similarity.topk(3).indices
    for row in range(5):
        slow = [float(cosine_similarity(query[row], key, dim=0)) for key in keys]
        assert similarity[row].tolist() == pytest.approx(slow, abs=1e-12)
        best = sorted(range(7), key=lambda place: -slow[place])[:3]
        assert chosen[row].tolist() == best
        for place, at in enumerate(best):
            assert torch.equal(pool.take(chosen)[row, place], pool.state()["prompts"][at])


def test_what_was_there_is_frozen_when_more_is_added() -> None:
    pool = filled(2)
    before = pool.state()
    pool.add(draw(1, 2, 3, seed=5), draw(1, 6, seed=6))
    assert len(pool) == 3
    assert [p.requires_grad for p in pool.prompts] == [p.requires_grad for p in pool.keys] == [False, True]
    assert all(torch.equal(pool.state()[key][:2], before[key]) for key in before)
    again = Pool.restore(pool.state())
    assert len(again) == 3
    assert all(torch.equal(again.state()[key], value) for key, value in pool.state().items())


def test_gradients_of_chosen_prompts_are_the_same_bits_every_time() -> None:
    """Large enough for threads to share the sum, which indexing does in any order."""
    pool = Pool()
    pool.add(torch.randn(10, 5, 128), torch.randn(10, 128))
    chosen, weight = torch.randint(10, (128, 5)), torch.randn(128, 5, 5, 128)
    grads = [torch.autograd.grad((pool.take(chosen) * weight).sum(), pool.prompts[0])[0] for _ in range(10)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    slow = torch.zeros(10, 5, 128, dtype=torch.float64)
    for place, at in enumerate(chosen.flatten()):
        slow[at] += weight.flatten(0, 1)[place]
    torch.testing.assert_close(grads[0].double(), slow, rtol=1e-4, atol=1e-4)


def test_the_vote_is_won_by_the_most_frequent_and_ties_by_the_first() -> None:
    chosen = torch.tensor([[4, 1], [4, 2], [1, 4], [3, 0]])  # votes: 0:1 1:2 2:1 3:1 4:3
    assert voted(chosen, 6).tolist() == [[4, 1]] * 4
    assert voted(torch.tensor([[3, 1, 2]]), 5).tolist() == [[1, 2, 3]]


def test_prompts_start_between_minus_one_and_one_by_the_generator_alone() -> None:
    one, two = (uniform((50, 40), torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)
    assert -1 <= one.min() < -0.99
    assert 0.99 < one.max() <= 1


@pytest.mark.parametrize(("clip", "scale"), [(1.0, 0.2), (10.0, 1.0), (None, 1.0)])
def test_adam_cuts_the_norm_of_all_gradients_together(clip: float | None, scale: float) -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = adam([a, b], 0.1, clip)
    (3 * a + 4 * b).backward()  # a gradient of norm 5
    optimizer.step()
    assert (float(a.grad), float(b.grad)) == pytest.approx((3 * scale, 4 * scale), rel=1e-5)
    assert (a.item(), b.item()) == pytest.approx((-0.1, -0.1), rel=1e-4)
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.defaults["weight_decay"] == 0


@every_kind
def test_these_vision_transformers_suit(options: dict[str, Any]) -> None:
    assert incompatibility(vit(**options)) is None
    assert prefix_problem(vit(**options), (0, 1, 2)) is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: timm.create_model("resnet10t"), "is a ResNet"),
        (lambda: vit(class_token=False, global_pool="avg"), "has none"),
        (lambda: vit(global_pool="avg"), "global_pool='avg'"),
        (lambda: vit(global_pool="map"), "global_pool='map'"),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224"), "VisionTransformerDistilled"),
        (lambda: nn.Linear(1, 1), "is a Linear"),
    ],
)
def test_these_do_not_and_the_reason_is_said(make: Any, reason: str) -> None:
    assert reason in (incompatibility(make()) or "")


def test_layers_and_blocks_that_take_no_prefix_are_named() -> None:
    assert "no layer 3 and 8 in this backbone" in (prefix_problem(vit(), (0, 3, 8)) or "")
    other = vit(block_fn=ParallelScalingBlock)
    assert incompatibility(other) is None
    assert "ParallelScalingBlock" in (prefix_problem(other, (0,)) or "")
