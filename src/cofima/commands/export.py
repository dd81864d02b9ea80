"""``cofima export``: a model for other programs."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from cofima import store
from cofima.commands.console import interruptible, progress, say
from cofima.commands.predict import find
from cofima.data.loading.loader import decoded
from cofima.data.loading.pixel_format import PixelFormat
from cofima.errors import CofimaError
from cofima.serve import export as exports
from cofima.serve import plain_timm

MOST_IMAGES = 32


def export(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    onnx: Annotated[
        Path | None, typer.Option(help="Write an ONNX file: uint8 images in, probabilities out.")
    ] = None,
    torchscript: Annotated[
        Path | None, typer.Option(help="Write a TorchScript archive that needs torch alone.")
    ] = None,
    timm: Annotated[
        Path | None, typer.Option(help="Write safetensors that plain timm loads, where the method allows it.")
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option("--check", help="Images, or folders of them, on which file and model are compared."),
    ] = None,
) -> None:
    """Write a model for other programs, with its class names and how to prepare images.

    What was written is compared with the model on images before it gets its name.
    """
    wanted = {
        "onnx": (onnx, exports.to_onnx),
        "torchscript": (torchscript, exports.to_torchscript),
        "timm": (timm, plain_timm.to_timm),
    }
    if not any(path for path, _ in wanted.values()):
        raise CofimaError("say what to write: --onnx FILE, --torchscript FILE or --timm FILE")
    loaded = exports.on_squares(store.load(model, where="cpu", progress=progress()))
    if timm is not None:
        plain_timm.refuse_not_plain(loaded, timm)  # before a slower export has been done for nothing
    pixels, source = _read(images, loaded.view.form) if images else exports.sample_images(loaded)
    with interruptible("files that were not finished are not there"):
        for path, write in wanted.values():
            if path is None:
                continue
            with progress().stage(f"writing {path}"):
                done = write(loaded, path, pixels)
            say(f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
            say(
                f"  compared with the model on {done.images} images {source}: logits differ by at most "
                f"{done.difference:.1e} (the largest is {done.largest:.1f})"
            )
    if timm is not None:
        settings = plain_timm.timm_settings(loaded)
        arguments = "".join(f", {key}={value}" for key, value in settings["arguments"].items())
        say(f"  timm.create_model('{settings['architecture']}'{arguments}, checkpoint_path='{timm}')")


def _read(given: list[str], pixel_format: PixelFormat) -> tuple[Tensor, str]:
    paths = list(find(given))[:MOST_IMAGES]
    found = list(decoded(paths, pixel_format))
    wrong = [f"{one.name}: {one.fault}" for one in found if one.fault]
    if wrong:
        raise CofimaError("\n".join(wrong))
    pixels = [one.pixels for one in found if one.pixels is not None]
    return torch.stack(pixels * (1 if len(pixels) > 1 else 2)), f"of {', '.join(given)}"
