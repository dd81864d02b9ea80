"""The head that grows: old rows stay, new rows start small, one flat matrix is the whole."""

import pytest
import torch
from torch import nn

from cofima.models.head import Head
from cofima.models.net import Net


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_blocks_own_their_columns_also_when_unequal() -> None:
    head = Head(4)
    for size in (3, 1, 2):
        head.grow(size, generator())
    assert head.sizes == [3, 1, 2]
    assert head.spans == [slice(0, 3), slice(3, 4), slice(4, 6)]
    x = torch.randn(5, 4, generator=generator())
    logits = head(x)
    assert logits.shape == (5, 6)
    for block, span in zip(head.blocks, head.spans, strict=True):
        assert torch.equal(logits[:, span], block(x))


def test_new_rows_are_small_and_truncated_and_the_bias_is_zero() -> None:
    head = Head(300)
    head.grow(200, generator(1))
    weight = head.blocks[0].weight.detach()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(weight.mean()) == pytest.approx(0, abs=5e-4)
    assert not head.blocks[0].bias.any()


def test_growing_depends_on_its_generator_alone() -> None:
    heads = [Head(4), Head(4)]
    for head, noise in zip(heads, (1, 2), strict=True):
        torch.manual_seed(noise)
        head.grow(3, generator(7))
    assert torch.equal(heads[0].blocks[0].weight, heads[1].blocks[0].weight)
    other = Head(4)
    other.grow(3, generator(8))
    assert not torch.equal(heads[0].blocks[0].weight, other.blocks[0].weight)


def test_flat_is_a_copy_that_can_be_put_back() -> None:
    head = Head(4, [3, 1, 2])
    flat = head.flat()
    x = torch.randn(5, 4)
    torch.testing.assert_close(x @ flat["weight"].T + flat["bias"], head(x))
    twin = Head(4, [3, 1, 2])
    twin.load_flat(**flat)
    assert torch.equal(twin(x), head(x))
    before = head.blocks[0].weight.detach().clone()
    flat["weight"].zero_()
    assert torch.equal(head.blocks[0].weight, before)


def test_flat_of_a_single_block_is_a_copy_too() -> None:
    head = Head(4, [3])
    head.flat()["weight"].zero_()
    assert head.blocks[0].weight.any()


def test_an_empty_head_has_no_logits() -> None:
    head = Head(4)
    assert head(torch.ones(2, 4)).shape == (2, 0)
    assert head.flat()["weight"].shape == (0, 4)
    head.load_flat(**head.flat())


@pytest.mark.parametrize("freeze", [True, False])
def test_growing_freezes_old_blocks_or_not(freeze: bool) -> None:
    net = Net(nn.Linear(2, 4), 4)
    net.grow(2, generator(), freeze=freeze)
    old = net.head.blocks[0].weight.detach().clone()
    net.grow(3, generator(), freeze=freeze)
    assert net.head.blocks[0].weight.requires_grad is not freeze
    assert net.head.blocks[1].weight.requires_grad
    assert torch.equal(net.head.blocks[0].weight, old)


def test_every_block_is_made_where_the_backbone_is() -> None:
    """The first block has no other block to follow: on a GPU it must not stay behind on the CPU."""
    net = Net(nn.Linear(2, 4).to("meta"), 4)
    net.grow(2, generator())
    net.grow(1, generator())
    assert {p.device.type for p in net.head.parameters()} == {"meta"}
