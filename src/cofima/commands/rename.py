"""``cofima rename``: another name for a class."""

from pathlib import Path
from typing import Annotated

import typer

from cofima.commands.console import say
from cofima.serve.classifier import load


def rename(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    old: Annotated[str, typer.Argument(help="The name of a class.")],
    new: Annotated[str, typer.Argument(help="Its new name.")],
) -> None:
    """Give a class another name; cofima undo takes it back."""
    classifier = load(model)
    classifier.rename(old, new)
    classifier.save()
    say(f"{model}: '{old}' is now called '{new}'")
