"""``cofima merge``: one model of several."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cofima import merging
from cofima.commands.console import progress, say
from cofima.merging.recipe import MergeMethod

LISTS = ("--weights", "--fisher")


class WithLists(TyperCommand):
    """A command with options that take all words up to the next option: ``--weights 0.2 0.3 0.5``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each word of a list its own option, as click expects it."""
        return super().parse_args(ctx, spread(args))


def spread(args: list[str]) -> list[str]:
    """Repeat the name of a list's option before each of its words."""
    words: list[str] = []
    current = ""
    for word in args:
        if word.startswith("-") and not _number(word):
            current = word if word in LISTS else ""
            words += [] if current else [word]
        else:
            words += [current, word] if current else [word]
    return words


def merge(
    models: Annotated[
        list[Path], typer.Argument(help="Model folders or .safetensors files; the order matters.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The merged folder or file.")],
    method: Annotated[
        MergeMethod, typer.Option("--method", "-m", help="How weights are merged.")
    ] = MergeMethod.average,
    lam: Annotated[
        float | None,
        typer.Option(
            help="Share of the second of two models (0.4; wise-ft 0.5); scale of task vectors (0.4; ties 1)."
        ),
    ] = None,
    weights: Annotated[
        list[float] | None,
        typer.Option(metavar="W1 W2 ...", help="How much each model counts, instead of lam."),
    ] = None,
    fisher: Annotated[
        list[Path] | None, typer.Option(metavar="F1 F2 ...", help="One file of cofima fisher for each model.")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="The weights that the models started from.")] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of each task vector that ties keeps (0.2).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it is there.")] = False,
) -> None:
    """Merge models of one architecture; folders may know different classes."""
    done = merging.merge(
        models,
        out,
        method.value,
        lam=lam,
        weights=weights,
        fisher=fisher,
        base=base,
        density=density,
        force=force,
        progress=progress(),
    )
    for note in done.notes:
        say(f"note: {note}")
    if done.classes:
        say(f"{done.label}, {len(done.classes)} classes, {done.bytes / 1e6:,.1f} MB")
        say(f"Model: {done.path}")
    else:
        say(f"Wrote {done.path}: {done.bytes / 1e6:,.1f} MB")


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
