"""Embedded backbone: a small ViT, pre-trained on Tiny-ImageNet, included in every installation."""

from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

WEIGHTS = Path(__file__).parent / "vit_micro.safetensors"

default_cfgs = generate_default_cfgs(
    {
        "vit_micro.tiny_imagenet": {
            "file": str(WEIGHTS),
            "num_classes": 0,
            "input_size": (3, 64, 64),
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
    }
)


@register_model  # type: ignore[untyped-decorator]
def vit_micro(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """Build a ViT for 64 px, or any multiple of 8: patch 8, width 128, depth 8, 4 heads, 1.6 M parameters."""
    shape = {"img_size": 64, "patch_size": 8, "embed_dim": 128, "depth": 8, "num_heads": 4}
    resized = {"pretrained_filter_fn": checkpoint_filter_fn}  # resamples positions to the image size
    return build_model_with_cfg(VisionTransformer, "vit_micro", pretrained, **resized, **(shape | options))
