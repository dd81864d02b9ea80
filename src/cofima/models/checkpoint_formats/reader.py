"""Safe reader of checkpoint files: runs no code, converts to timm's names, checks every key."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cofima.core.errors import CofimaError, first_problems
from cofima.core.names import shortened
from cofima.models.checkpoint_formats import jax
from cofima.models.checkpoint_formats.layouts import to_timm

FORMATS = ".pth, .pth.tar, .pt, .bin, .safetensors, .npz"
# keys under which training scripts store the weights; the result of DINO is its teacher
_NESTED = ("state_dict", "model", "teacher")


def load_checkpoint(module: nn.Module, path: Path) -> str:
    """Load every parameter of a backbone from a file; return a description of the conversion."""
    if path.suffix == ".npz":
        _refuse_absent(path)
        return jax.fill_backbone(module, path)
    weights, layout = to_timm(read_weights(path), module)
    if wrong := _misfits(module.state_dict(), weights):
        raise first_problems(f"checkpoint {path}, read as {layout},", wrong)
    module.load_state_dict(weights)
    return layout


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read tensors from a .safetensors or torch file; nothing but tensors is ever unpickled."""
    _refuse_absent(path)
    loaded: Any
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            # memory-mapped, so that a merge never holds a whole model; files from before torch 1.6 are not
            # zip archives, and cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CofimaError(
            f"checkpoint {path}: truncated or not a checkpoint ({_first_sentence(error)}); files are taken "
            f"as {FORMATS}"
        ) from error
    except Exception as error:  # pickle.UnpicklingError, and anything that a foreign pickle may raise
        if (text := _as_text(path)) is not None:
            raise CofimaError(
                f"checkpoint {path}: not a checkpoint but a text, which begins '{text}'; perhaps a page or a "
                "pointer (git LFS) was downloaded in place of the file"
            ) from error
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
    return _dense(path, {str(key): value for key, value in loaded.items()})


def _dense(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights; raise one error that lists all tensors that are not dense real numbers."""
    wrong = [f"{key}: {fault}" for key, value in weights.items() if (fault := _odd(value))]
    if wrong:
        raise first_problems(f"checkpoint {path}", wrong)
    return weights


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, without torch's advice."""
    return shortened(str(error).strip().partition("\n")[0].partition(". ")[0], 200)


def _as_text(path: Path) -> str | None:
    """Return the beginning of a file that is a text, or None; a pickle begins with a control character."""
    with path.open("rb") as file:
        start = file.read(60)
    try:
        text = start.decode("ascii").strip().partition("\n")[0]
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def _odd(tensor: Tensor) -> str:
    """Return why a tensor is not a dense tensor of real numbers, or an empty string if it is."""
    if tensor.is_meta:
        return "on the device 'meta', which has shapes but no numbers"
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')}); save it dequantized"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"stored as {str(tensor.layout).removeprefix('torch.')}; save it with to_dense()"
    if tensor.is_complex():
        return "complex numbers, where weights are real"
    claimed, there = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    return f"claims {claimed:,} bytes, and {there:,} are there" if claimed > there else ""


def _refuse_absent(path: Path) -> None:
    if not path.is_file():
        raise CofimaError(f"checkpoint {path}: no such file")


def _refusal(path: Path, error: Exception) -> str:
    """Return the message for a file with more than tensors, with a safe way to extract them."""
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
    """Return all keys that are missing, unexpected or of another shape."""
    wrong = [f"missing: {key}" for key in there if key not in weights]
    wrong += [f"unexpected: {key}" for key in weights if key not in there]
    return wrong + [
        f"shape of {key}: {list(weights[key].shape)} in the file, {list(there[key].shape)} in the backbone"
        for key in there
        if key in weights and there[key].shape != weights[key].shape
    ]
