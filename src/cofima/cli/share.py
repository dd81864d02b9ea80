"""Commands that share a model: export, card, push, and a web page."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cofima.classifier.web.limits import Limits
from cofima.cli.console import (
    AnyModel,
    ModelFolder,
    interruptible,
    out_option,
    progress,
    read_model,
    say,
    started,
    warn,
)
from cofima.cli.model import find_images
from cofima.core.atomic import write_text
from cofima.core.errors import CofimaError
from cofima.core.names import printable

if TYPE_CHECKING:
    from torch import Tensor

    from cofima.data.loading.pixel_format import PixelFormat

MOST_IMAGES = 32  # maximum number for the comparison of an exported file with the model
LOOPBACK = ("127.0.0.1", "localhost", "::1")

License = Annotated[
    str | None,
    typer.Option("--license", help="License identifier of the hub; by default that of the backbone."),
]


def export(
    model: AnyModel,
    onnx: Annotated[
        Path | None, typer.Option(help="Write an ONNX file: uint8 images in, probabilities out.")
    ] = None,
    pt2: Annotated[
        Path | None, typer.Option(help="Write a torch.export program (.pt2) that only needs torch.")
    ] = None,
    torchscript: Annotated[
        Path | None,
        typer.Option(help="Write a TorchScript archive, for old versions of torch; prefer --pt2."),
    ] = None,
    timm: Annotated[
        Path | None, typer.Option(help="Write safetensors for plain timm, if the method allows it.")
    ] = None,
    timm_hub: Annotated[
        Path | None,
        typer.Option(help="Write a folder for the hub, for timm.create_model('hf_hub:...')."),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option("--check", help="Images, or folders of images, to compare file and model on."),
    ] = None,
) -> None:
    """Export a model for other programs, with its class names and preprocessing.

    Each file is compared with the model on images, and only written if the logits agree.
    """
    from cofima.classifier.export import formats, plain_timm
    from cofima.store.model import load_model

    wanted = [  # first those that may be refused, so that no slow export is done in vain
        (timm_hub, plain_timm.to_timm_hub),
        (timm, plain_timm.to_timm),
        (onnx, formats.to_onnx),
        (pt2, formats.to_pt2),
        (torchscript, formats.to_torchscript),
    ]
    if not any(path for path, _ in wanted):
        raise CofimaError(
            "give a file to write: --onnx FILE, --pt2 FILE, --torchscript FILE, --timm FILE, or "
            "--timm-hub FOLDER"
        )
    loaded = formats.on_squares(load_model(read_model(model), where="cpu", progress=progress()))
    pixels, source = (
        _read_images(images, loaded.view.pixel_format) if images else formats.sample_images(loaded)
    )
    with interruptible("files that were not finished are not there"):
        for path, write in wanted:
            if path is None:
                continue
            with progress().stage(f"writing {path}"):
                done = write(loaded, path, pixels)
            say(f"Wrote {path} ({_size(path) / 1e6:.1f} MB)")
            say(
                f"  compared with the model on {done.images} images {source}: logits differ by at most "
                f"{done.difference:.1e} (the largest is {done.largest:.1f})"
            )
    if timm is not None:
        settings = plain_timm.timm_settings(loaded)
        arguments = "".join(f", {key}={value}" for key, value in settings["arguments"].items())
        say(f"  timm.create_model('{settings['architecture']}'{arguments}, checkpoint_path='{timm}')")
    if timm_hub is not None:
        say(f"  timm.create_model('local-dir:{timm_hub}', pretrained=True)")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def _read_images(given: list[str], pixel_format: PixelFormat) -> tuple[Tensor, str]:
    import torch

    from cofima.classifier.predict import decode_readable

    paths = find_images(given)[:MOST_IMAGES]
    pixels = decode_readable(paths, pixel_format)
    return torch.stack(pixels * (1 if len(pixels) > 1 else 2)), f"of {', '.join(given)}"


def card(
    model: AnyModel,
    path: Annotated[
        Path | None, out_option("Write to this file, e.g. README.md, instead of the terminal.")
    ] = None,
    license: License = None,
) -> None:
    """Write the model card: classes, images, accuracy, backbone, license, limits, commands to reproduce it.

    The format is Markdown with the front matter that the Hugging Face hub reads.
    """
    from cofima.classifier.export.card import model_card, name_of
    from cofima.store.model import load_model

    folder = read_model(model)
    text = model_card(load_model(folder, where="cpu", progress=progress()), name_of(folder), license)
    if path is None:
        started()
        typer.echo(printable(text), nl=False)
        return
    write_text(path, text)
    say(f"Wrote {path}")


def push(
    model: ModelFolder,
    repo: Annotated[str, typer.Argument(help="NAME or OWNER/NAME on the hub; created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    license: License = None,
    with_images: Annotated[
        bool, typer.Option("--with-images", help="Also upload the images stored in the model.")
    ] = False,
    with_features: Annotated[
        bool, typer.Option("--with-features", help="Also upload the stored features of held-out images.")
    ] = False,
) -> None:
    """Upload a model and its card to the Hugging Face hub, in one commit.

    Needs a token (hf auth login, or HF_TOKEN). The model can be loaded from a download of the repository.
    """
    from cofima.classifier.export import hub

    with interruptible("the hub has all of it or nothing"), progress().stage(f"uploading to {repo}"):
        where = hub.push(
            model,
            repo,
            private=private,
            license=license,
            with_images=with_images,
            with_features=with_features,
        )
    say(f"Model: {where}")


def serve(
    model: ModelFolder,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 127.0.0.1 is this machine only.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; by default the first free one from 7860.")
    ] = None,
    max_files: Annotated[int, typer.Option(min=1, help="Maximum images per upload.")] = Limits.files,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Maximum megabytes per file.")] = Limits.megabytes,
    max_megapixels: Annotated[int, typer.Option(min=1, help="Maximum megapixels per image.")] = (
        Limits.megapixels
    ),
    max_total_megabytes: Annotated[
        int, typer.Option(min=1, help="Maximum megabytes of an hour's uploads.")
    ] = (Limits.total_megabytes),
    names: Annotated[
        list[str] | None,
        typer.Option("--name", help="Another host name of the page, such as of a proxy; may be repeated."),
    ] = None,
) -> None:
    r"""Serve a web page to classify images, and to add a class from a few photographs.

    Needs cofima[app]. Everybody who can open the page can change the model; other sites cannot, and requests
    for other host names are refused.
    """
    from cofima.classifier.web import app
    from cofima.classifier.web.session import Session
    from cofima.classifier.web.uploads import upload_folder
    from cofima.core.extras import import_extra
    from cofima.core.signals import handle_signals

    import_extra("gradio", "app")
    session = Session(model, Limits(max_files, max_megabytes, max_megapixels, max_total_megabytes))
    if host not in LOOPBACK:
        warn(
            f"on {host} everybody who can reach this machine can use and change the model; the page asks for "
            "no password, and nothing is encrypted"
        )
    try:
        with handle_signals(), upload_folder() as uploads:
            tempfile.tempdir = str(uploads.parent)  # so that incomplete uploads are removed with the others
            _, where = app.serve(session, uploads, host, port, names or [])
            say(f"Open {where} in a browser; Ctrl-C ends it")
            while True:
                time.sleep(1)
    except KeyboardInterrupt as error:
        number = getattr(error, "signal", signal.SIGINT)
        raise typer.Exit(0 if number == signal.SIGINT else 128 + number) from None
