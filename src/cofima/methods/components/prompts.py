r"""Prompts for a frozen vision transformer, inserted by hooks.

A prompt is a set of tokens added to those of the image, or a prefix: rows added to the keys and values of an
attention layer, :math:`K = [P_K; K]` and :math:`V = [P_V; V]`, with unchanged queries. Both are inserted by
hooks on timm's modules within a ``with`` block: the network itself is not changed, and attention is computed
by timm's own code (fused if timm fuses it).
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
    """Pool of prompts of the same shape, each with a key."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList()
        self.keys = nn.ParameterList()

    def __len__(self) -> int:
        return sum(map(len, self.keys))

    def add(self, prompts: Tensor, keys: Tensor) -> None:
        """Add prompts [n, ...] and keys [n, width]; freeze all earlier ones."""
        self.requires_grad_(False)
        self.prompts.append(nn.Parameter(prompts.detach().clone()))
        self.keys.append(nn.Parameter(keys.detach().clone()))

    def similarity(self, query: Tensor) -> Tensor:
        """Return the cosine similarity of each query [B, width] and each key: [B, prompts]."""
        return normalize(query, dim=1) @ normalize(torch.cat(list(self.keys)), dim=1).T

    def take(self, chosen: Tensor) -> Tensor:
        """Return the prompts at indices [B, k]: [B, k, ...]."""
        prompts = torch.cat(list(self.prompts))
        # equals prompts[chosen], whose gradient is summed in a nondeterministic order
        return embedding(chosen, prompts.flatten(1)).reshape(*chosen.shape, *prompts.shape[1:])

    def state(self) -> dict[str, Tensor]:
        """Return the prompts and keys as tensors."""
        return {
            "prompts": torch.cat([block.detach() for block in self.prompts]),
            "keys": torch.cat([block.detach() for block in self.keys]),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Tensor]) -> "Pool":
        """Return a pool from the result of :meth:`state`."""
        pool = cls()
        pool.add(state["prompts"], state["keys"])
        return pool


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw initial prompts or keys, uniformly between -1 and 1."""
    return torch.empty(*shape).uniform_(-1, 1, generator=generator)


def voted(chosen: Tensor, pool: int) -> Tensor:
    """Return the prompts chosen by most images, for every image; ties go to the first in the pool."""
    votes = distributed.all_reduce_sum(torch.bincount(chosen.flatten(), minlength=pool))
    winners = votes.sort(descending=True, stable=True).indices[: chosen.shape[1]]
    return winners.expand_as(chosen)


def adam(parameters: Sequence[nn.Parameter], lr: float, clip: float | None) -> Adam:
    """Return an Adam optimizer that clips the total gradient norm to ``clip`` before each step."""
    optimizer = Adam(parameters, lr)

    def cut(*_: Any) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)

    optimizer.register_step_pre_hook(cut)
    return optimizer


@contextmanager
def tokens_inserted(vit: "VisionTransformer", tokens: Tensor) -> Iterator[slice]:
    """Insert tokens [B, n, width] after the class token and registers; yield their positions.

    They get the position embedding of the class token if it has one.
    """
    first = vit.num_prefix_tokens
    if vit.pos_embed is not None and not vit.no_embed_class:
        tokens = tokens + vit.pos_embed[:, :1]

    def insert(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        (x,) = args
        return torch.cat([x[:, :first], tokens.to(x.dtype), x[:, first:]], dim=1)

    handle = vit.norm_pre.register_forward_pre_hook(insert)  # the first module after position embeddings
    try:
        yield slice(first, first + tokens.shape[1])
    finally:
        handle.remove()


def mean_of_tokens(vit: "VisionTransformer", images: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean output, after the final norm, at the positions of the inserted tokens."""
    with tokens_inserted(vit, tokens) as places:
        outputs: Tensor = vit.forward_features(images)
    return outputs[:, places].mean(1)


@contextmanager
def prefixes(vit: "VisionTransformer", by_layer: Mapping[int, Tensor]) -> Iterator[None]:
    """Add prefixes [B, 2, length, width] (keys, then values) to the attention of the given layers."""
    handles: list[RemovableHandle] = []
    try:
        for layer, prefix in by_layer.items():
            handles += _prefix(vit.blocks[layer].attn, prefix)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _prefix(attention: nn.Module, prefix: Tensor) -> list[RemovableHandle]:
    """Prepend dummy tokens, replace their keys and values with the prefix, and drop their outputs."""
    keys, values = prefix.unbind(1)
    rows = torch.cat(
        [torch.zeros_like(keys), keys, values], dim=2
    )  # the outputs of these tokens are dropped, so their queries are arbitrary
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
    """Return why these layers cannot have prefixes, or None if they can."""
    from timm.models.vision_transformer import Attention

    if late := [layer for layer in layers if layer >= len(vit.blocks)]:
        named = " and ".join(map(str, late))
        return f"there is no layer {named} in this backbone, whose layers run from 0 to {len(vit.blocks) - 1}"
    kinds = [type(getattr(vit.blocks[layer], "attn", vit.blocks[layer])) for layer in layers]
    other = sorted({kind.__name__ for kind in kinds if kind is not Attention})
    return f"prefixes go into timm's Attention; this backbone has {', '.join(other)}" if other else None
