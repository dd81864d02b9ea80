"""``cofima undo``: the state before, in force again."""

from pathlib import Path
from typing import Annotated

import typer

from cofima import generations
from cofima.commands.console import say


def undo(model: Annotated[Path, typer.Argument(help="A model folder.")]) -> None:
    """Go back to the state before the last change; the state before that one is no longer kept."""
    left, now = generations.undo(model)
    say(
        f"{model} is again as it was: {now.name} with {len(now.record.classes)} classes "
        f"({left.name} is no longer in force)"
    )
