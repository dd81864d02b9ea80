"""``cofima app``: a page in the browser for a model."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from cofima.commands.console import errors, say
from cofima.serve import app as pages
from cofima.serve.extras import needed
from cofima.serve.studio import Limits, Studio

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def app(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    host: Annotated[str, typer.Option(help="Who may come; 127.0.0.1 is this machine only.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The first free one from 7860.")] = None,
    max_files: Annotated[int, typer.Option(min=1, help="Images that are taken at once.")] = Limits.files,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Size of an image file.")] = Limits.megabytes,
    max_megapixels: Annotated[int, typer.Option(min=1, help="Millions of pixels of an image.")] = (
        Limits.megapixels
    ),
) -> None:
    """Open a page on which people drop images, see their classes, and add a class from a few photographs.

    Needs cofima[app]. Whoever can open the page can change the model.
    """
    needed("gradio", "app")
    studio = Studio(model, Limits(max_files, max_megabytes, max_megapixels))
    if host not in LOOPBACK:
        errors.print(
            f"warning: on {host} everybody who can reach this machine can use and change the model; the page "
            "asks for no password, and what is sent is not encrypted",
            style="yellow",
            highlight=False,
        )
    with TemporaryDirectory(prefix="cofima-app-") as uploads:
        page, where = pages.serve(studio, Path(uploads), host, port, wait=False)
        say(f"Open {where} in a browser; Ctrl-C ends it")
        try:
            page.block_thread()
        except KeyboardInterrupt:
            page.close(verbose=False)
