"""Tiny networks and tiny runs: what the tests of the core learn with, in well under a second each."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from cofima.core import distributed
from cofima.core.progress import SILENT, Progress
from cofima.core.seeds import Seeds
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import Dataset, Stream, from_groups
from cofima.data.transforms import View
from cofima.experiment.config import check
from cofima.experiment.run import run
from cofima.models import backbone
from cofima.models.net import Net
from cofima.models.options import ModelOptions
from cofima.store.config import Config
from cofima.store.model import Model, attach
from cofima.training.context import Batch, Context
from cofima.training.options import TrainOptions

torch.set_num_threads(1)  # networks this small only lose time by sharing their work

SIDE = 16
_SHARED = {
    "input_size": (3, SIDE, SIDE),
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
}
# the name that timm's generate_default_cfgs + register_model look for in this module
default_cfgs = generate_default_cfgs(
    {
        "vit_test.untrained": _SHARED
        | {"fixed_input_size": True, "first_conv": "patch_embed.proj", "classifier": "head"},
        "resnet_test.untrained": _SHARED | {"first_conv": "conv1", "classifier": "fc"},
    }
)


def vit_test(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """A ViT of 16 px, patch 8, width 16, depth 2."""
    shape = {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    net = build_model_with_cfg(VisionTransformer, "vit_test", pretrained, **(shape | options))
    for name, weight in net.named_parameters():  # timm's small weights hide the image from an untrained net
        if not pretrained and weight.ndim > 1 and not name.startswith(("cls_token", "pos_embed", "head")):
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return net


def resnet_test(pretrained: bool = False, **options: Any) -> ResNet:
    """A ResNet with BatchNorm of four blocks."""
    shape = {"block": BasicBlock, "layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "stem_width": 8}
    return build_model_with_cfg(ResNet, "resnet_test", pretrained, **(shape | options))


register_model(vit_test)
register_model(resnet_test)

BACKBONES = ("vit_test", "resnet_test")
# quick to learn on the blobs: two epochs at rates that a tiny untrained network needs
TRAIN = {"epochs": 2, "batch_size": 16, "lr": 0.05, "backbone_lr_scale": 0.2}
# what makes a run of a few steps small, where a method has such an option: an alignment of two passes,
# a moving average that follows within a few steps, a projection that is not a thousand times wider, a
# memory of fewer images than there are, and a penalty against which a tiny network still learns
SMALL: dict[str, Any] = {
    "align": {"epochs": 2, "samples_per_class": 16},
    "decay": 0.5,
    "projection": 64,
    "memory_size": 24,
    "lamb": 0.3,
}
# few prompts beside the four patches that vit_test sees, and prefixes in the two layers that it has
PROMPTS = {"lr": 0.3, "length": 1, "top_k": 1, "g_layers": (0,), "e_layers": (1,)}


def options_for(method: str, network: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make a method small, and fit for the network where the method says how."""
    from cofima import methods
    from cofima.methods.components.prompted import Prompted

    kind = methods.find(method)
    known = SMALL | (PROMPTS if issubclass(kind, Prompted) else {})
    small = {name: value for name, value in known.items() if name in kind.__dataclass_fields__}
    fit = {} if network.startswith("vit") else kind.options_for_any_backbone
    return small | fit | options


def tiny_config(method: str = "seq_ft", network: str = "vit_test", **more: Any) -> Config:
    """Return a checked configuration on the blobs; ``options`` are the method's."""
    values: dict[str, Any] = {
        "method": method,
        "options": options_for(method, network, more.pop("options", {})),
        "dataset": "blobs",
        "backbone": network,
        "model": {"pretrained": False},
        "train": TRAIN | more.pop("train", {}),
        "device": "cpu",
        "seed": 3,
    }
    return check(values | more)


@cache
def drawn_blobs(classes: int, per_class: int, seed: int, precision: torch.dtype) -> Dataset:
    """Return blobs, which tests ask for over and over; they are drawn in the default ``precision``."""
    assert precision == torch.get_default_dtype()
    return blobs(classes, per_class, SIDE, seed)


def tiny_stream(groups: Sequence[int] = (2, 2, 2), per_class: int = 12, seed: int = 0) -> Stream:
    """Return blobs dealt into tasks of these sizes; the images are the caller's own."""
    dataset = deepcopy(drawn_blobs(sum(groups), per_class, seed, torch.get_default_dtype()))
    classes = iter(range(sum(groups)))
    return from_groups(dataset, [[next(classes) for _ in range(size)] for size in groups])


def tiny_model(config: Config, stream: Stream, progress: Progress = SILENT) -> Model:
    """Return a model that has learned nothing yet, for a stream that no configuration names."""
    from cofima import methods

    module, facts = backbone.create(config.backbone, config.model, config.seed)
    view = View(facts.size, facts.stored, facts.mean, facts.std, stream.flip, stream.crop)
    planned = len(methods.build(config.method, config.options).stream(stream))
    model = attach(config, facts, view, Net(module, facts.features), planned, progress)
    model.data = stream.facts
    return model


def tiny_run(
    folder: Path, config: Config, stream: Stream | None = None, progress: Progress = SILENT
) -> Model:
    """Learn a whole stream into a folder."""
    stream = tiny_stream() if stream is None else stream
    model = tiny_model(config, stream, progress)
    return run(model, model.method.stream(stream), folder, progress)


def tiny_context(train: dict[str, Any] | None = None, seed: int = 0, tasks: int = 3) -> Context:
    """Return what a method learns with."""
    view = View(SIDE, SIDE, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return Context(view, TrainOptions(**(TRAIN | (train or {}))), Seeds(seed), torch.device("cpu"), tasks)


def tiny_batch(images: Tensor, labels: Tensor, pixels: Tensor | None = None) -> Batch:
    """Return images as a step has them in a single process."""
    stored = images if pixels is None else pixels
    return Batch(images, labels, stored, distributed.full_shard(len(labels)))


def tiny_net(network: str = "vit_test", seed: int = 0, sizes: Sequence[int] = ()) -> Net:
    """Return a network without, or with given, blocks in its head."""
    module, facts = backbone.create(network, ModelOptions(pretrained=False), seed)
    net = Net(module, facts.features)
    for index, size in enumerate(sizes):
        net.grow(size, torch.Generator().manual_seed(seed + index))
    return net


class Tiny:
    """The helpers above, for tests in any folder."""

    config = staticmethod(tiny_config)
    stream = staticmethod(tiny_stream)
    model = staticmethod(tiny_model)
    run = staticmethod(tiny_run)
    context = staticmethod(tiny_context)
    net = staticmethod(tiny_net)
    batch = staticmethod(tiny_batch)
    backbones = BACKBONES
