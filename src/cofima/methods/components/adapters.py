"""Parameter-efficient tuning of a frozen vision transformer: adapters, scale and shift, deep prompts.

The modules are attached to the backbone by hooks. The backbone keeps all its parameter names and gains new
ones (``blocks.0.adapter.down.weight``), so that its weights are saved and loaded as usual.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, relu

from cofima.data.image_set import ImageSet
from cofima.models.head import CosineHead
from cofima.models.net import Net
from cofima.training.context import NO_HOOKS, Context, Hooks
from cofima.training.loop import sgd
from cofima.training.options import TrainOptions

Petl = Literal["adapter", "ssf", "vpt", "none"]
IN_A_BLOCK = ("norm1", "attn", "norm2", "mlp")


class Adapt(BaseModel):
    """Options for adapting a backbone to the first task. The defaults are RanPAC's."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=0)] = 20
    """Epochs on the first task."""
    batch_size: Annotated[int, Field(ge=1)] = 48
    """Images per step."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Initial learning rate; it decays along a cosine, per epoch."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of all trained parameters."""
    width: Annotated[int, Field(ge=1)] = 64
    """Bottleneck width of an adapter."""
    scale: float = 0.1
    """Scale of an adapter's output."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout inside an adapter, in training."""
    tokens: Annotated[int, Field(ge=1)] = 5
    """Prompt tokens per block, for vpt."""

    def train(self, precision: Literal["fp32", "bf16"]) -> TrainOptions:
        """Return options of the training loop; all trained parameters share one learning rate."""
        same = self.model_dump(include={"epochs", "batch_size", "lr", "momentum", "weight_decay"})
        return TrainOptions(**same, backbone_lr_scale=1.0, schedule="cosine", precision=precision)


class Inserted(nn.Module):
    """Base class of modules that change the output of the module they are attached to, while on."""

    def __init__(self) -> None:
        super().__init__()
        self.on: Tensor
        self.register_buffer("on", torch.tensor(True))


class Adapter(Inserted):
    r"""Adapter parallel to a block's MLP, :math:`s\, W_{up}\, \mathrm{ReLU}(W_{down}\, x)`; initially 0."""

    def __init__(self, block: nn.Module, width: int, how: Adapt, generator: torch.Generator) -> None:
        super().__init__()
        self.scale, self.dropout = how.scale, how.dropout
        self.down, self.up = nn.Linear(width, how.width), nn.Linear(how.width, width)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5), generator=generator)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)
        block.get_submodule("norm2").register_forward_pre_hook(self.keep)
        block.register_forward_hook(self.add)

    def keep(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        """Store the input of the MLP branch."""
        self.seen: Tensor | None = args[0]

    def add(self, block: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Add the adapter's output to the block's."""
        seen, self.seen = self.seen, None
        assert seen is not None
        if not self.on:
            return output
        inner = dropout(relu(self.down(seen)), self.dropout, self.training)
        added: Tensor = self.up(inner)
        return output + self.scale * added


class ScaleShift(Inserted):
    r"""Scale and shift of an output per channel, :math:`\gamma \odot x + \beta` (SSF)."""

    def __init__(self, owner: nn.Module, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.02 * torch.randn(width, generator=generator))
        self.shift = nn.Parameter(0.02 * torch.randn(width, generator=generator))
        owner.register_forward_hook(self.change)

    def change(self, owner: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Scale and shift the owner's output."""
        if not self.on:
            return output
        shape = (-1, 1, 1) if isinstance(owner, nn.Conv2d) else (-1,)
        return output * self.scale.view(shape) + self.shift.view(shape)


class Prompt(Inserted):
    """Prompt tokens of one block, appended to its input and removed from its output (VPT-deep)."""

    def __init__(self, block: nn.Module, width: int, how: Adapt) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(how.tokens, width))
        block.register_forward_pre_hook(self.join)
        block.register_forward_hook(self.leave)

    def join(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Append the tokens."""
        if not self.on:
            return args
        return torch.cat([args[0], self.tokens.expand(args[0].shape[0], -1, -1)], dim=1), *args[1:]

    def leave(self, block: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Remove the tokens."""
        return output[:, : -len(self.tokens)] if self.on else output


def unsuited(backbone: nn.Module, petl: Petl) -> str | None:
    """Return why a backbone cannot be adapted in this way, or None if it can."""
    if petl == "none":
        return None
    from timm.models.vision_transformer import VisionTransformer

    blocks = list(backbone.blocks) if isinstance(backbone, VisionTransformer) else []
    if blocks and all(hasattr(block, name) for block in blocks for name in IN_A_BLOCK):
        return None
    return (
        f"petl={petl} needs a vision transformer whose blocks have {', '.join(IN_A_BLOCK)}, and this "
        f"backbone is a {type(backbone).__name__}. Give options.petl=none, or a backbone such as vit_micro"
    )


def insert(backbone: nn.Module, petl: Petl, how: Adapt, generator: torch.Generator) -> list[Inserted]:
    """Freeze a backbone, attach the modules that adapt it, and return them."""
    backbone.requires_grad_(False)
    if petl == "none":
        return []
    vit: Any = backbone  # checked before, by :func:`unsuited`
    layers = [m for m in vit.modules() if isinstance(m, nn.Linear | nn.LayerNorm | nn.Conv2d)]
    owners, width = layers if petl == "ssf" else list(vit.blocks), int(vit.embed_dim)
    make: dict[Petl, Callable[[Any], Inserted]] = {
        "adapter": lambda block: Adapter(block, width, how, generator),
        "ssf": lambda layer: ScaleShift(layer, _channels(layer), generator),
        "vpt": lambda block: Prompt(block, width, how),
    }
    made = [make[petl](owner) for owner in owners]
    for owner, one in zip(owners, made, strict=True):
        owner.add_module(petl, one.requires_grad_(False).train(owner.training))
    return made


def adapt(
    backbone: nn.Module,
    width: int,
    inserted: list[Inserted],
    images: ImageSet,
    how: Adapt,
    context: Context,
    hooks: Hooks = NO_HOOKS,
) -> bool:
    """Train the inserted modules with a temporary cosine head, on images labeled from 0.

    With a single class there is nothing to learn: the modules are switched off.

    Returns:
        True if the modules were trained.
    """
    learner, classes = Net(backbone, width), int(images.labels.max()) + 1
    if classes == 1:
        for one in inserted:
            one.on.fill_(False)
        return False
    head = CosineHead(width, classes, context.seeds.generator("cosine head"))
    learner.head = head.to(context.device)
    for one in inserted:
        one.requires_grad_(True)
    context = replace(context, train=how.train(context.train.precision))
    hooks = replace(hooks, stop=None)  # early stopping would not evaluate this temporary head
    sgd(learner, images, lambda b: cross_entropy(learner(b.images), b.labels), context, task=0, hooks=hooks)
    backbone.requires_grad_(False)
    return True


def _channels(layer: nn.Linear | nn.LayerNorm | nn.Conv2d) -> int:
    if isinstance(layer, nn.LayerNorm):
        return int(layer.normalized_shape[-1])
    return layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
