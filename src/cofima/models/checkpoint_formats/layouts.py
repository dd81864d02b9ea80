"""Key layouts of published checkpoints, and their conversion to timm's names.

A layout is recognized by its keys. Everything that a conversion drops or changes is reported.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

StateDict = dict[str, Tensor]
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes added by DistributedDataParallel and torch.compile


def to_timm(weights: StateDict, module: nn.Module) -> tuple[StateDict, str]:
    """Convert weights to the names of a backbone without classifier; describe the conversion."""
    keys = unwrapped(weights)
    layout, convert = next((name, convert) for name, seen, convert in LAYOUTS if seen(keys))
    kept = _without_classifier(convert(keys), module)
    left = Counter(_owner(key) for key in keys.keys() - _origins(keys, kept))
    done = [f"left out {', '.join(f'{name} ({n})' for name, n in sorted(left.items()))}"] if left else []
    done += _positions(kept, module) + _batch_counts(kept, module)
    return kept, "; ".join([layout, *done])


def _without_decoder(weights: StateDict) -> StateDict:
    """Drop the decoder and mask token of MAE and DINOv2; all other names are timm's."""
    return {k: v for k, v in weights.items() if k != "mask_token" and not k.startswith("decoder_")}


Recognizer = Callable[[Collection[str]], bool]
# tried in this order; the last one matches everything
LAYOUTS: tuple[tuple[str, Recognizer, Callable[[StateDict], StateDict]], ...] = (
    # the momentum encoder and the predictor of MoCo v3 are only used in pre-training
    ("MoCo v3", lambda keys: _any_below(keys, "base_encoder."), lambda w: _below(w, "base_encoder.")),
    # a full DINO checkpoint also has the projection head
    ("DINO", lambda keys: _any_below(keys, "backbone."), lambda w: _below(w, "backbone.")),
    ("MAE", lambda keys: {"mask_token", "decoder_embed.weight"} <= set(keys), _without_decoder),
    ("DINOv2", lambda keys: "mask_token" in keys, _without_decoder),
    ("torchvision's names", lambda keys: "layer1.0.conv1.weight" in keys, dict),
    ("timm's names", lambda keys: True, dict),
)


def _any_below(keys: Collection[str], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in keys)


def _below(weights: StateDict, prefix: str) -> StateDict:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def unwrapped(weights: StateDict) -> StateDict:
    """Remove the prefixes that wrappers added to all names."""
    for prefix in _WRAPPERS:
        if weights and all(key.startswith(prefix) for key in weights):
            weights = _below(weights, prefix)
    return weights


def _without_classifier(weights: StateDict, module: nn.Module) -> StateDict:
    """Drop the classifier, and the layer before it, called ``pre_logits`` in old versions of timm."""
    name = classifier(module)
    return {k: v for k, v in weights.items() if not k.startswith((f"{name}.", "pre_logits."))}


def classifier(module: nn.Module) -> str:
    """Return timm's name for the classifier of a backbone."""
    name = getattr(module, "pretrained_cfg", {}).get("classifier", "head")
    return name if isinstance(name, str) else "cofima_head"


def _owner(key: str) -> str:
    return key.removeprefix("base_encoder.").removeprefix("backbone.").split(".")[0]


def _origins(before: StateDict, after: StateDict) -> set[str]:
    """Return the original keys of the tensors that were kept, possibly under new names."""
    kept = {id(value) for value in after.values()}
    return {key for key, value in before.items() if id(value) in kept}


def _positions(weights: StateDict, module: nn.Module) -> list[str]:
    """Resample a square grid of position embeddings to the backbone's grid, as timm does."""
    from timm.layers import resample_abs_pos_embed

    ours, theirs = getattr(module, "pos_embed", None), weights.get("pos_embed")
    grid = getattr(getattr(module, "patch_embed", None), "grid_size", None)
    if not isinstance(ours, Tensor) or theirs is None or grid is None or theirs.ndim != 3:
        return []
    extra = 0 if getattr(module, "no_embed_class", False) else int(getattr(module, "num_prefix_tokens", 1))
    side = math.isqrt(max(theirs.shape[1] - extra, 0))
    if theirs.shape[1] == ours.shape[1] or side * side + extra != theirs.shape[1]:
        return []
    weights["pos_embed"] = resample_abs_pos_embed(theirs, new_size=list(grid), num_prefix_tokens=extra)
    return [f"positions {side} x {side} resampled to {grid[0]} x {grid[1]}"]


def _batch_counts(weights: StateDict, module: nn.Module) -> list[str]:
    """Add the batch counters that files from before torch 0.4.1 lack; they are never used here."""
    names = [k for k in module.state_dict() if k.endswith(".num_batches_tracked") and k not in weights]
    has = [k for k in names if k.replace("num_batches_tracked", "running_mean") in weights]
    weights |= {key: torch.tensor(0) for key in has}
    return [f"{len(has)} counters of batch normalization set to 0"] if has else []
