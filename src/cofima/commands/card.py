"""``cofima card``: a model described for others."""

from pathlib import Path
from typing import Annotated

import typer

from cofima import store
from cofima.commands.console import progress, say
from cofima.files import write_text
from cofima.serve.card import model_card, name_of


def card(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    path: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write it to a file, e.g. README.md.")
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="The hub's name of a licence; the backbone's by default.")
    ] = None,
) -> None:
    """Describe a model: classes, images, accuracy, backbone and licence, limits, how to repeat it.

    Markdown with the front matter that the Hugging Face hub reads.
    """
    text = model_card(store.load(model, where="cpu", progress=progress()), name_of(model), licence)
    if path is None:
        typer.echo(text, nl=False)
        return
    write_text(path, text)
    say(f"Wrote {path}")
