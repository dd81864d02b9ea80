"""Reader of checkpoints: without running code, converted to timm's names, checked key by key."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cofima.core.errors import CofimaError, first_problems
from cofima.models.checkpoint_formats import jax
from cofima.models.checkpoint_formats.layouts import to_timm

FORMATS = ".pth, .pth.tar, .pt, .bin, .safetensors, .npz"
# where training scripts keep the weights; DINO's teacher is its result
_NESTED = ("state_dict", "model", "teacher")


def load_checkpoint(module: nn.Module, path: Path) -> str:
    """Fill every parameter of a backbone from a file; return a description of the conversion."""
    if path.suffix == ".npz":
        _refuse_absent(path)
        return jax.fill_backbone(module, path)
    weights, layout = to_timm(read_weights(path), module)
    if wrong := _misfits(module.state_dict(), weights):
        raise first_problems(f"checkpoint {path}, read as {layout},", wrong)
    module.load_state_dict(weights)
    return layout


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read tensors from a .safetensors or torch file; never unpickle anything but tensors."""
    _refuse_absent(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CofimaError(
            f"checkpoint {path}: truncated or not a checkpoint ({error}); files are taken as {FORMATS}"
        ) from error
    except Exception as error:  # pickle.UnpicklingError and what a foreign pickle may raise
        raise CofimaError(_refusal(path, error)) from error
    for key in _NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        keys = list(loaded)[:8] if isinstance(loaded, Mapping) else [type(loaded).__name__]
        raise CofimaError(
            f"checkpoint {path}: expected a mapping of names to tensors, at the top or below one of "
            f"{', '.join(_NESTED)}; found {', '.join(map(str, keys)) or 'nothing'}"
        )
    if odd := [f"{key}: {kind}" for key, value in loaded.items() if (kind := _odd_kind(value))]:
        raise first_problems(f"checkpoint {path}: weights are plain tensors of real numbers; it", odd)
    return {str(key): value for key, value in loaded.items()}


def _odd_kind(value: Tensor) -> str:
    """Return the kind of a tensor that is none of plain numbers, which no backbone can be filled with."""
    if value.device.type == "meta":
        return "has a shape, and no numbers (meta)"
    if value.layout != torch.strided:
        return "sparse"
    return "quantized" if value.is_quantized else "complex" if value.is_complex() else ""


def _refuse_absent(path: Path) -> None:
    if not path.is_file():
        raise CofimaError(f"checkpoint {path}: no such file")


def _refusal(path: Path, error: Exception) -> str:
    """Return the message for a file with more than tensors, with a safe way to extract these."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f" ({named[1]})" if named else ""
    return (
        f"checkpoint {path}: holds more than tensors{what}, and reading that could run any code: it is not "
        "read. If you trust its source, or where it can do no harm (a container without network), take the "
        "tensors out once, and give the new file:\n"
        f'  python -c "import torch, safetensors.torch as s; '
        f"c = torch.load('{path.name}', weights_only=False, "
        "map_location='cpu'); w = c.get('state_dict') or c.get('model') or c.get('teacher') or c; "
        "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, 'weights.safetensors')\""
    )


def _misfits(there: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """Return every key that is missing, unexpected or of another shape."""
    wrong = [f"missing: {key}" for key in there if key not in weights]
    wrong += [f"unexpected: {key}" for key in weights if key not in there]
    return wrong + [
        f"shape of {key}: {list(weights[key].shape)} in the file, {list(there[key].shape)} in the backbone"
        for key in there
        if key in weights and there[key].shape != weights[key].shape
    ]
