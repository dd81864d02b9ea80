"""``cofima forget``: a class taken out."""

from pathlib import Path
from typing import Annotated

import typer

from cofima.commands.console import say
from cofima.serve.classifier import load


def forget(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    name: Annotated[str, typer.Argument(metavar="CLASS", help="The name of a class.")],
) -> None:
    """Take a class out of a model: it is never named again; cofima undo brings it back.

    Its row, its statistics and its kept images go; what the backbone learned from it stays.
    """
    classifier = load(model)
    classifier.forget(name)
    classifier.save()
    say(f"{model}: '{name}' is forgotten; {len(classifier.classes)} classes are left")
