r"""Prompts for a frozen vision transformer, inserted by hooks.

A prompt is tokens that join the image's own, or a prefix: rows that join the keys and the values of
an attention, :math:`K = [P_K; K]` and :math:`V = [P_V; V]`, while the queries stay as they are.
Both are put in by hooks on timm's modules that live as long as a ``with`` block: the network itself
is not changed, and it computes attention in its own way (fused where timm fuses it).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, normalize
from torch.optim import Adam
from torch.utils.hooks import RemovableHandle

from cofima.core import distributed
from cofima.methods.state import Entry

PROMPTS = (Entry("prompts", predicts="prompts"), Entry("keys", predicts="prompts"))

if TYPE_CHECKING:  # timm takes seconds to import, and describing a method does not need it
    from timm.models.vision_transformer import VisionTransformer


class Pool(nn.Module):
    """Prompts of one shape, each found by its key."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList()
        self.keys = nn.ParameterList()

    def __len__(self) -> int:
        return sum(map(len, self.keys))

    def add(self, prompts: Tensor, keys: Tensor) -> None:
        """Add prompts [n, ...] and keys [n, width]; those that were there are frozen from now on."""
        self.requires_grad_(False)
        self.prompts.append(nn.Parameter(prompts.detach().clone()))
        self.keys.append(nn.Parameter(keys.detach().clone()))

    def similarity(self, query: Tensor) -> Tensor:
        """Return the cosine of each query [B, width] and each key: [B, prompts]."""
        return normalize(query, dim=1) @ normalize(torch.cat(list(self.keys)), dim=1).T

    def take(self, chosen: Tensor) -> Tensor:
        """Return the prompts at [B, k]: [B, k, ...]."""
        prompts = torch.cat(list(self.prompts))
        # as prompts[chosen], whose gradient is added up in an order that changes from run to run
        return embedding(chosen, prompts.flatten(1)).reshape(*chosen.shape, *prompts.shape[1:])

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        return {
            "prompts": torch.cat([block.detach() for block in self.prompts]),
            "keys": torch.cat([block.detach() for block in self.keys]),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Tensor]) -> "Pool":
        """Return the pool that :meth:`state` stored."""
        pool = cls()
        pool.add(state["prompts"], state["keys"])
        return pool


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw initial prompts or keys, uniformly between -1 and 1."""
    return torch.empty(*shape).uniform_(-1, 1, generator=generator)


def voted(chosen: Tensor, pool: int) -> Tensor:
    """Give every image the prompts that most images chose; ties go to those that are first in the pool."""
    votes = distributed.all_reduce_sum(torch.bincount(chosen.flatten(), minlength=pool))
    winners = votes.sort(descending=True, stable=True).indices[: chosen.shape[1]]
    return winners.expand_as(chosen)


def adam(parameters: Sequence[nn.Parameter], lr: float, clip: float | None) -> Adam:
    """Return Adam that first clips the norm of all gradients together to ``clip``."""
    optimizer = Adam(parameters, lr)

    def cut(*_: Any) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)

    optimizer.register_step_pre_hook(cut)
    return optimizer


@contextmanager
def tokens_inserted(vit: "VisionTransformer", tokens: Tensor) -> Iterator[slice]:
    """Insert tokens [B, n, width] into each image's, behind class token and registers; yield their places.

    They get the position embedding of the class token, where it has one.
    """
    first = vit.num_prefix_tokens
    if vit.pos_embed is not None and not vit.no_embed_class:
        tokens = tokens + vit.pos_embed[:, :1]

    def insert(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        (x,) = args
        return torch.cat([x[:, :first], tokens.to(x.dtype), x[:, first:]], dim=1)

    handle = vit.norm_pre.register_forward_pre_hook(insert)  # what follows the positions
    try:
        yield slice(first, first + tokens.shape[1])
    finally:
        handle.remove()


def mean_of_tokens(vit: "VisionTransformer", images: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean output, after the final norm, at the places of inserted tokens."""
    with tokens_inserted(vit, tokens) as places:
        outputs: Tensor = vit.forward_features(images)
    return outputs[:, places].mean(1)


@contextmanager
def prefixes(vit: "VisionTransformer", by_layer: Mapping[int, Tensor]) -> Iterator[None]:
    """Add prefixes [B, 2, length, width] (first keys, then values) to the attention of these layers."""
    handles: list[RemovableHandle] = []
    try:
        for layer, prefix in by_layer.items():
            handles += _prefix(vit.blocks[layer].attn, prefix)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _prefix(attention: nn.Module, prefix: Tensor) -> list[RemovableHandle]:
    """Make room for more tokens, put the prefix where their keys and values are, drop their outputs."""
    keys, values = prefix.unbind(1)
    rows = torch.cat(
        [torch.zeros_like(keys), keys, values], dim=2
    )  # their outputs are dropped, so any query will do
    length = rows.shape[1]

    def make_room(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = args
        return torch.cat([x.new_zeros(x.shape[0], length, x.shape[2]), x], dim=1), *rest

    def fill(_: nn.Module, __: Any, qkv: Tensor) -> Tensor:
        return torch.cat([rows.to(qkv.dtype), qkv[:, length:]], dim=1)

    def drop(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return out[:, length:]

    return [
        attention.register_forward_pre_hook(make_room),
        attention.get_submodule("qkv").register_forward_hook(fill),
        attention.register_forward_hook(drop),
    ]


def prefix_problem(vit: "VisionTransformer", layers: Sequence[int]) -> str | None:
    """Return the reason why prefixes cannot go into these layers, or None."""
    from timm.models.vision_transformer import Attention

    if late := [layer for layer in layers if layer >= len(vit.blocks)]:
        named = " and ".join(map(str, late))
        return f"there is no layer {named} in this backbone, whose layers run from 0 to {len(vit.blocks) - 1}"
    kinds = [type(getattr(vit.blocks[layer], "attn", vit.blocks[layer])) for layer in layers]
    other = sorted({kind.__name__ for kind in kinds if kind is not Attention})
    return f"prefixes go into timm's Attention; this backbone has {', '.join(other)}" if other else None
