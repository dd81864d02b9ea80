"""Google's vision transformers: .npz archives with JAX names, read by timm's loader."""

import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from cofima.core.errors import CofimaError, first_problems

_MOST_POSITIONS = 100_001  # as for an image of 5,000 x 5,000 pixels
_LEFT_OUT = ("head/kernel", "head/bias", "pre_logits/kernel", "pre_logits/bias")
_POSITIONS = "Transformer/posembed_input/pos_embedding"
_OUTSIDE = {
    "cls": "cls_token",
    _POSITIONS: "pos_embed",
    "embedding/kernel": "patch_embed.proj.weight",
    "embedding/bias": "patch_embed.proj.bias",
    "Transformer/encoder_norm/scale": "norm.weight",
    "Transformer/encoder_norm/bias": "norm.bias",
}
_ATTENTION = "MultiHeadDotProductAttention_1"
_IN_A_BLOCK = {
    "LayerNorm_0/scale": "norm1.weight",
    "LayerNorm_0/bias": "norm1.bias",
    **{f"{_ATTENTION}/{part}/kernel": "attn.qkv.weight" for part in ("query", "key", "value")},
    **{f"{_ATTENTION}/{part}/bias": "attn.qkv.bias" for part in ("query", "key", "value")},
    f"{_ATTENTION}/out/kernel": "attn.proj.weight",
    f"{_ATTENTION}/out/bias": "attn.proj.bias",
    "LayerNorm_2/scale": "norm2.weight",
    "LayerNorm_2/bias": "norm2.bias",
    "MlpBlock_3/Dense_0/kernel": "mlp.fc1.weight",
    "MlpBlock_3/Dense_0/bias": "mlp.fc1.bias",
    "MlpBlock_3/Dense_1/kernel": "mlp.fc2.weight",
    "MlpBlock_3/Dense_1/bias": "mlp.fc2.bias",
}


def fill_backbone(module: nn.Module, path: Path) -> str:
    """Load a .npz file into a vision transformer; return a description of the conversion.

    All names and sizes are checked first. Then all weights are set to NaN before timm's loader runs, so that
    a weight that it does not load is detected.
    """
    if not isinstance(module, VisionTransformer):
        raise CofimaError(
            f"checkpoint {path}: .npz files hold vision transformers, and this backbone is a "
            f"{type(module).__name__}"
        )
    shapes = _shapes(path)
    if wrong := _misfits(module, shapes):
        raise first_problems(f"checkpoint {path}, read as JAX,", wrong)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    try:
        module.load_pretrained(str(path))
    except Exception as error:  # right sizes but wrong shapes, or a damaged array
        raise CofimaError(f"checkpoint {path}, read as JAX, does not fit this backbone: {error}") from error
    if empty := [name for name, value in module.named_parameters() if value.isnan().any()]:
        raise first_problems(f"checkpoint {path}, read as JAX,", [f"no numbers for {name}" for name in empty])
    left = sorted(name for name in _LEFT_OUT if name in shapes)
    done = [f"left out {', '.join(left)}"] if left else []
    if shapes[_POSITIONS][1] != module.pos_embed.shape[1]:
        done.append(f"{shapes[_POSITIONS][1]} positions resampled to {module.pos_embed.shape[1]}")
    return "; ".join(["JAX", *done])


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array in an archive, by name without the optimizer's prefix.

    Only headers are read: a tiny archive may claim arrays of any size.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = {member.filename: _shape(archive, member) for member in archive.infolist()}
    except Exception as error:  # zipfile, zlib and numpy each raise their own errors
        raise CofimaError(
            f"checkpoint {path}: truncated or not a .npz archive of arrays ({error or type(error).__name__})"
        ) from error
    return {name.removesuffix(".npy").removeprefix("opt/target/"): shape for name, shape in found.items()}


def _shape(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[int, ...]:
    """Return the shape of one array; raise if it is not numeric, or its size does not match its header."""
    if not member.filename.endswith(".npy"):
        raise ValueError(f"{member.filename} is not an array")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, kind = read[version](file)
        if kind.kind not in "fiub":
            raise ValueError(f"{member.filename} holds {kind}, not numbers")
        claimed = file.tell() + math.prod(shape) * kind.itemsize
    if claimed != member.file_size:
        raise ValueError(f"{member.filename} claims {claimed:,} bytes and has {member.file_size:,}")
    return tuple(shape)


def _misfits(module: VisionTransformer, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Return all arrays that are missing, unexpected, or differ in size from the backbone's."""
    ours, expected = dict(module.named_parameters()), dict(_OUTSIDE)
    for n in range(len(module.blocks)):
        place = f"Transformer/encoderblock_{n}"
        expected |= {f"{place}/{name}": f"blocks.{n}.{key}" for name, key in _IN_A_BLOCK.items()}
    wrong = [f"missing: {name}" for name in expected if name not in shapes]
    wrong += [f"missing: {key} (JAX files have none)" for key in ours.keys() - set(expected.values())]
    wrong += [f"unexpected: {name}" for name in shapes.keys() - expected.keys() - set(_LEFT_OUT)]
    for name, key in expected.items():
        if name in shapes and not _fits(name, shapes[name], ours.get(key), module):
            there = list(ours[key].shape) if key in ours else "nothing"
            wrong.append(f"shape of {name}: {list(shapes[name])} in the file, {key} {there} in the backbone")
    return wrong


def _fits(name: str, shape: tuple[int, ...], ours: torch.Tensor | None, vit: VisionTransformer) -> bool:
    if ours is None:
        return False
    if name == _POSITIONS:
        return len(shape) == 3 and shape[0] == 1 and shape[1] < _MOST_POSITIONS and shape[2] == ours.shape[2]
    parts = 3 if "qkv" in _IN_A_BLOCK.get(name.split("/", 2)[-1], "") else 1
    heads = shape[1] if name.endswith(("query/kernel", "key/kernel", "value/kernel")) else None
    return parts * int(np.prod(shape)) == ours.numel() and heads in (None, vit.blocks[0].attn.num_heads)
