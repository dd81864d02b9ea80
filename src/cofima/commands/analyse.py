"""``cofima analyse``: the paper's analyses, each with a figure and a CSV file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cofima.analyse.distance import distance as measure_distance
from cofima.analyse.fishers import fisher as measure_fisher
from cofima.analyse.landscape import landscape as measure_landscape
from cofima.analyse.output import ready
from cofima.analyse.path import path as measure_path
from cofima.analyse.trajectories import trajectories as measure_trajectories
from cofima.commands.analyse_runs import OUT, Out, Task, backbones, finish, lambda_, scratch
from cofima.commands.console import progress

app = typer.Typer(
    no_args_is_help=True,
    help="Look into runs as the paper does: each analysis writes a figure and a CSV file.",
    epilog="Example: cofima analyse path runs/coma",
)
app.command("lambda", epilog="Example: cofima analyse lambda demo.yaml --methods coma,cofima --out lambda")(
    lambda_
)
app.command(epilog="Example: cofima analyse backbones demo.yaml --backbones vit_micro,resnet10t.c3_in1k")(
    backbones
)
app.command(epilog="Example: cofima analyse scratch demo.yaml --own train.backbone_lr_scale=1")(scratch)


class HeadKind(StrEnum):
    """Which head measures a network between two others."""

    raw = "raw"
    aligned = "aligned"


Run = Annotated[Path, typer.Argument(help="A run folder.")]
Runs = Annotated[list[Path], typer.Argument(help="Run folders that keep all states (keep_checkpoints=true).")]
Head = Annotated[HeadKind, typer.Option("--head", help="The head as trained, or aligned to each network.")]


@app.command(epilog="Example: cofima analyse distance runs/coma runs/slca --out distance")
def distance(runs: Runs, out: Out = OUT) -> None:
    """Measure how far apart the weights are after each task, over all of them and per layer."""
    ready(out)
    finish(measure_distance(runs, progress()), out)


@app.command(epilog="Example: cofima analyse path runs/coma --points 21")
def path(
    run: Run,
    out: Out = OUT,
    task: Task = None,
    points: Annotated[int, typer.Option(min=3, help="Networks to measure, the ends among them.")] = 11,
    head: Head = HeadKind.raw,
    images: Annotated[int | None, typer.Option(min=1, help="Test images a task; by default all.")] = None,
) -> None:
    """Measure loss and accuracy from the weights before a task to those after its training."""
    ready(out)
    finish(measure_path(run, task, points, head.value, images, progress()), out)


@app.command(epilog="Example: cofima analyse landscape runs/cofima --grid 11 --images 60")
def landscape(
    run: Run,
    out: Out = OUT,
    task: Task = None,
    grid: Annotated[int, typer.Option(min=5, help="Networks along each side.")] = 15,
    images: Annotated[int, typer.Option(min=1, help="Test images a task.")] = 200,
    head: Head = HeadKind.raw,
) -> None:
    """Measure the plane through the weights at the start, before a task, and after its training."""
    ready(out)
    finish(measure_landscape(run, task, grid, images, head.value, progress()), out)


@app.command(epilog="Example: cofima analyse trajectories runs/fresh runs/mean runs/coma")
def trajectories(
    runs: Runs,
    out: Out = OUT,
    grid: Annotated[int, typer.Option(min=0, help="Networks along each side; 0 draws the ways alone.")] = 9,
    images: Annotated[int, typer.Option(min=1, help="Training and test images a task.")] = 60,
) -> None:
    """Draw the ways of runs from one start (the paper's Fig. 2), over what class means reach around them."""
    ready(out)
    finish(measure_trajectories(runs, grid, images, progress()), out)


@app.command(epilog="Example: cofima analyse fisher runs/cofima")
def fisher(run: Run, out: Out = OUT, task: Task = None) -> None:
    """Measure Fisher information per layer: how old and new overlap, and which weights each side gets."""
    ready(out)
    finish(measure_fisher(run, task, progress()), out)
