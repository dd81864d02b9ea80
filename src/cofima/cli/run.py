"""Commands that learn a stream of tasks: run, demo, and track for its metrics in a tracker."""

from pathlib import Path
from typing import Annotated

import typer

from cofima.cli.console import (
    DataRoot,
    Overrides,
    SkipUnreadable,
    interruptible,
    out_option,
    print_runs,
    progress,
    say,
)

KIND, TRACKERS = "KIND[:WHERE]", "tensorboard[:DIR], wandb[:online] or mlflow[:URI]; may be given again."


def demo(
    folder: Annotated[Path, out_option("Folder of the runs and the report.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of class order, heads and batches.")] = 1993,
) -> None:
    """Learn the embedded digits with five methods, and show how much each forgets.

    Takes two to three minutes on two CPU cores, offline. The same command continues after an interruption.
    """
    from cofima.experiment.demo import demo as learn_demo

    with interruptible():
        runs = learn_demo(folder, seed, progress())
    print_runs(runs)
    say(f"\nFigures: {folder / 'report.html'}")
    say(
        "Try next:\n"
        f"  cofima run demo.yaml options.lam=auto --out {folder / 'auto'}\n"
        f"  cofima report {folder}\n"
        "  cofima show cofima\n"
        "  cofima run demo.yaml dataset=folder:PATH_TO_YOUR_IMAGES data.max_train_per_class=50"
    )


def run(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or a recipe of the package: demo.yaml, paper.yaml.")
    ],
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, out_option("The model folder; by default named after the run, in runs/.")
    ] = None,
    skip_unreadable: SkipUnreadable = False,
    data_root: DataRoot = None,
    track_with: Annotated[list[str] | None, typer.Option("--track", metavar=KIND, help=TRACKERS)] = None,
) -> None:
    """Learn a stream of tasks; the same command continues after a crash."""
    from cofima import report
    from cofima.experiment import config as configs
    from cofima.experiment import trackers
    from cofima.experiment.grid.cells import plain_name
    from cofima.experiment.launch import launch

    skipping = ["data.skip_unreadable=true"] if skip_unreadable else []
    how = configs.read(config, [*(overrides or []), *skipping])
    where = folder or Path("runs") / plain_name(how)
    with interruptible():
        trackers.tracked(track_with or [], how, where, lambda heard: launch(how, where, progress(), heard))
    print_runs(report.find([where]))
    say(f"Model: {where}")


def track(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.")],
    to: Annotated[list[str], typer.Option("--to", metavar=KIND, help=TRACKERS)],
) -> None:
    """Show a run in TensorBoard, Weights & Biases or MLflow: on disk, unless you name a server."""
    from cofima import report
    from cofima.experiment import trackers

    chosen = trackers.choose(to, folder, report.read(folder).config)
    lines = trackers.replay(chosen, folder)
    say(f"{lines} lines of {folder / 'metrics.jsonl'} to {', '.join(to)}")
