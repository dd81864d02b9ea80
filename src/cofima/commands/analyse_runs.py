"""``cofima analyse``, what learns or compares whole runs: lambda, backbones and scratch."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cofima.analyse import compare
from cofima.analyse.output import Result, ready
from cofima.analyse.posthoc import posthoc
from cofima.analyse.sweep import Sweep, sweep
from cofima.commands.console import interruptible, progress, say
from cofima.errors import CofimaError

OUT = Path("analysis")
KEPT = "cells that are finished are kept, the same command goes on with the others"


class Tested(StrEnum):
    """Which shares are learned on all training images and tested."""

    chosen = "chosen"
    all = "all"
    none = "none"


class By(StrEnum):
    """Which accuracy chooses."""

    last = "last"
    inc = "inc"


Out = Annotated[Path, typer.Option("--out", "-o", help="Where the figures and the CSV file go.")]
Task = Annotated[int | None, typer.Option("--task", min=2, help="The task to look at; by default the last.")]
What = Annotated[str, typer.Argument(help="A recipe to learn, or a run folder.")]
Changes = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="What differs.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time; by default one per core.")
]


def finish(result: Result, folder: Path) -> None:
    """Write what an analysis found, and say what it says."""
    for line in result.said:
        say(line)
    for file in result.write(folder):
        say(f"Wrote {file}")


def lambda_(
    what: What,
    overrides: Changes = None,
    out: Out = OUT,
    lams: Annotated[str, typer.Option(help="Shares of the new weights.")] = "0,.1,.2,.3,.4,.5,.6,.7,.8,.9,1",
    names: Annotated[
        str, typer.Option("--methods", help="Of a recipe: what learns.")
    ] = "coma,cofima,wise_ft",
    held_out: Annotated[
        float, typer.Option(help="Of a recipe: share of training images to choose by.")
    ] = 0.2,
    test: Annotated[Tested, typer.Option(help="Of a recipe: which shares are tested.")] = Tested.chosen,
    by: Annotated[By, typer.Option(help="Of a recipe: the accuracy that chooses.")] = By.last,
    seeds: Annotated[str, typer.Option(help="Of a recipe: seeds, by default its own.")] = "",
    jobs: Jobs = None,
    task: Task = None,
) -> None:
    """Sweep the share of the new weights.

    A recipe is learned at every share on part of its training images, and the best share is chosen on the
    rest. Of a run, one task is merged at every share, without training.
    """
    ready(out)
    shares = _numbers("--lams", lams)
    if Path(what).is_dir():
        if overrides:
            raise CofimaError(f"{what} is a run folder: it is swept as it is, without {' '.join(overrides)}")
        finish(posthoc(Path(what), shares, task, progress()), out)
        return
    if task is not None:
        raise CofimaError("--task is for a run folder: a recipe is learned with all of its tasks")
    whole = [int(seed) for seed in _numbers("--seeds", seeds)]
    how = Sweep(_words(names), shares, whole, held_out, by.value, test.value)
    with interruptible(KEPT):
        result = sweep(what, overrides or [], how, out, jobs or os.cpu_count() or 1, progress())
    finish(result, out)


def backbones(
    what: Annotated[list[str], typer.Argument(help="Run folders, or a recipe and what differs (KEY=VALUE).")],
    out: Out = OUT,
    names: Annotated[str, typer.Option("--backbones", help="Of a recipe: the backbones.")] = "",
    with_methods: Annotated[
        str, typer.Option("--methods", help="Of a recipe: what learns.")
    ] = "slca,cofima,joint",
    jobs: Jobs = None,
) -> None:
    """Compare methods on different backbones."""
    ready(out)
    if Path(what[0]).is_dir():
        finish(compare.backbones([Path(folder) for folder in what]), out)
        return
    if len(_words(names)) < 2:
        raise CofimaError("--backbones: give two or more, with commas between; see: cofima list backbones")
    with interruptible(KEPT):
        many = jobs or os.cpu_count() or 1
        chosen = _words(names), _words(with_methods)
        result = compare.learn_backbones(what[0], what[1:], *chosen, out, many, progress())
    finish(result, out)


def scratch(
    recipe: Annotated[str, typer.Argument(help="A recipe to learn.")],
    overrides: Changes = None,
    out: Out = OUT,
    with_methods: Annotated[str, typer.Option("--methods", help="What learns.")] = "joint,cofima",
    own: Annotated[
        list[str] | None,
        typer.Option("--own", metavar="KEY=VALUE", help="What differs from scratch; may be given again."),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Compare pre-trained weights with weights from scratch."""
    ready(out)
    with interruptible(KEPT):
        many = jobs or os.cpu_count() or 1
        chosen = _words(with_methods), own or []
        result = compare.scratch(recipe, overrides or [], *chosen, out, many, progress())
    finish(result, out)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError as error:
        raise CofimaError(f"{option} {text}: expected numbers with commas between") from error
