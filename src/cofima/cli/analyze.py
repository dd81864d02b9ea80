"""``cofima analyze``: the paper's analyses, each with figures and a CSV file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cofima.cli.console import Overrides, interruptible, out_option, progress, register, say
from cofima.core.errors import CofimaError

if TYPE_CHECKING:
    from cofima.analysis.output import Result

FOLDER = Path("analysis")
CELLS_KEPT = "finished cells are kept, the same command continues with the others"

Out = Annotated[Path, out_option("Folder for the figures and the CSV file.")]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Runs = Annotated[list[Path], typer.Argument(help="Run folders with all checkpoints (keep_checkpoints=true).")]
Head = Annotated[
    Literal["raw", "aligned"], typer.Option("--head", help="The head as trained, or aligned to each network.")
]
Task = Annotated[int | None, typer.Option("--task", min=2, help="The task to analyze; by default the last.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Parallel runs; by default one per core.")
]


def _distance(runs: Runs, out: Out = FOLDER) -> None:
    """Measure the distances between the weights after each task, in total and per layer."""
    from cofima.analysis.distance import distance

    _write(out, lambda: distance(runs, progress()))


def _path(
    run: Run,
    out: Out = FOLDER,
    task: Task = None,
    points: Annotated[int, typer.Option(min=3, help="Number of points, including both ends.")] = 11,
    head: Head = "raw",
    images: Annotated[int | None, typer.Option(min=1, help="Test images per task; by default all.")] = None,
) -> None:
    """Measure loss and accuracy along the line from the weights before a task to those after training."""
    from cofima.analysis.path import path

    _write(out, lambda: path(run, task, points, head, images, progress()))


def _landscape(
    run: Run,
    out: Out = FOLDER,
    task: Task = None,
    grid: Annotated[int, typer.Option(min=5, help="Number of points along each side.")] = 15,
    images: Annotated[int, typer.Option(min=1, help="Test images per task.")] = 200,
    head: Head = "raw",
) -> None:
    """Measure the plane through three points: the initial weights, and those before and after a task."""
    from cofima.analysis.landscape import landscape

    _write(out, lambda: landscape(run, task, grid, images, head, progress()))


def _trajectories(
    runs: Runs,
    out: Out = FOLDER,
    grid: Annotated[int, typer.Option(min=0, help="Points along each side; 0 draws no background.")] = 9,
    images: Annotated[int, typer.Option(min=1, help="Training and test images per task.")] = 60,
    trained: Annotated[
        bool, typer.Option(help="Re-run tasks, to show the weights after training, before each merge.")
    ] = True,
) -> None:
    """Draw the weight trajectories of runs from one start (the paper's Fig. 2), over a map of accuracy."""
    from cofima.analysis.trajectories import trajectories

    _write(out, lambda: trajectories(runs, grid, images, trained, progress()))


def _fisher(run: Run, out: Out = FOLDER, task: Task = None) -> None:
    """Measure the overlap of old and new Fisher information, and the resulting shares, per layer."""
    from cofima.analysis.fisher import fisher

    _write(out, lambda: fisher(run, task, progress()))


def _lambda(
    source: Annotated[
        str,
        typer.Argument(metavar="RECIPE|RUN|RUNS", help="A recipe to run, a run folder, or a folder of runs."),
    ],
    overrides: Overrides = None,
    out: Out = FOLDER,
    lams: Annotated[str, typer.Option(help="Shares of the new weights.")] = "0,.1,.2,.3,.4,.5,.6,.7,.8,.9,1",
    methods: Annotated[
        str, typer.Option(help="For a recipe: methods; by default those of lambda.yaml.")
    ] = "",
    val_fraction: Annotated[
        float, typer.Option(help="For a recipe: held-out fraction of the training images.")
    ] = 0.2,
    test: Annotated[
        Literal["chosen", "all", "none"], typer.Option(help="For a recipe: shares to test.")
    ] = "chosen",
    by: Annotated[
        Literal["last", "inc"],
        typer.Option(help="For a recipe or runs: the accuracy to choose by, or to plot."),
    ] = "last",
    seeds: Annotated[str, typer.Option(help="For a recipe: seeds; by default its own.")] = "",
    jobs: Jobs = None,
    task: Task = None,
) -> None:
    """Sweep the share of the new weights (lam).

    A recipe is run with every share on a part of its training images, and the best share is chosen on the
    held-out rest. For a run, one task is merged with every share, without training. For a folder of runs,
    such as that of cofima grid lambda.yaml, the accuracies at their shares are plotted.
    """
    from cofima.analysis.share import Sweep, posthoc, sweep
    from cofima.analysis.share_of_runs import share_of_runs
    from cofima.store.generation import CURRENT

    shares, place = _numbers("--lams", lams), Path(source)
    if place.is_dir() or place.suffix == ".jsonl":
        if overrides:
            raise CofimaError(f"{source} has finished runs, which take no settings: {' '.join(overrides)}")
        one = (place / CURRENT).is_file()
        _write(out, lambda: posthoc(place, shares, task, progress()) if one else share_of_runs(place, by))
        return
    if task is not None:
        raise CofimaError("--task is for a run folder: a recipe is learned with all of its tasks")
    whole = [int(seed) for seed in _numbers("--seeds", seeds)]
    plan = Sweep(_words(methods), shares, whole, val_fraction, by, test)
    _write(out, lambda: sweep(source, overrides or [], plan, out, _jobs(jobs), progress()), CELLS_KEPT)


def _backbones(
    source: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE [KEY=VALUE]...|RUN...", help="A recipe to run, or run folders."),
    ],
    out: Out = FOLDER,
    backbones: Annotated[str, typer.Option(help="For a recipe: the backbones.")] = "",
    methods: Annotated[
        str, typer.Option(help="For a recipe: methods; by default those of backbones.yaml.")
    ] = "",
    jobs: Jobs = None,
) -> None:
    """Compare methods on different backbones."""
    from cofima.analysis import backbones as compare

    if Path(source[0]).is_dir():
        _write(out, lambda: compare.backbones([Path(folder) for folder in source]))
        return
    names = _words(backbones)
    if len(names) < 2:
        raise CofimaError("--backbones: give two or more, separated by commas; see: cofima list backbones")
    recipe, *overrides = source
    _write(
        out,
        lambda: compare.learn_backbones(
            recipe, overrides, names, _words(methods), out, _jobs(jobs), progress()
        ),
        CELLS_KEPT,
    )


def _scratch(
    recipe: Annotated[str, typer.Argument(help="A recipe to run.")],
    overrides: Overrides = None,
    out: Out = FOLDER,
    methods: Annotated[str, typer.Option(help="Methods; by default those of scratch.yaml.")] = "",
    own: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Setting of training from scratch; may be repeated."),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Compare pre-trained weights with training from scratch."""
    from cofima.analysis.backbones import scratch

    _write(
        out,
        lambda: scratch(recipe, overrides or [], _words(methods), own or [], out, _jobs(jobs), progress()),
        CELLS_KEPT,
    )


analyze = typer.Typer(
    no_args_is_help=True,
    help="Analyze runs as the paper does: each analysis writes figures and a CSV file.",
    epilog="Example: cofima analyze path runs/coma",
)
register(
    analyze,
    "cofima analyze",
    (_lambda, "lambda demo.yaml --methods coma,cofima --out lambda"),
    (_backbones, "backbones demo.yaml --backbones vit_micro,resnet10t.c3_in1k"),
    (_scratch, "scratch demo.yaml --own train.backbone_lr_scale=1"),
    (_distance, "distance runs/coma runs/slca --out distance"),
    (_path, "path runs/coma --points 21"),
    (_landscape, "landscape runs/cofima --grid 11 --images 60"),
    (_trajectories, "trajectories runs/fresh runs/mean runs/coma"),
    (_fisher, "fisher runs/cofima"),
)


def _write(folder: Path, analysis: Callable[[], Result], kept: str = "nothing was written") -> None:
    """Run an analysis, print its findings and write its files."""
    from cofima.analysis.output import ready

    ready(folder)  # before any work
    with interruptible(kept):
        result = analysis()
    for line in result.summary:
        say(line)
    for file in result.write(folder):
        say(f"Wrote {file}")


def _jobs(given: int | None) -> int:
    return given or os.cpu_count() or 1


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError as error:
        raise CofimaError(f"{option} {text}: expected numbers separated by commas") from error
