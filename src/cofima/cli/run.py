"""Commands for runs: run, demo, and track, which sends metrics to a tracker."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cofima.cli.console import (
    DataRoot,
    Overrides,
    SkipUnreadable,
    interruptible,
    out,
    out_option,
    print_runs,
    progress,
    say,
)
from cofima.cli.grid import print_outcome, watching

DEMO_CELLS = 5  # methods in demo.yaml, which cannot be read before torch is imported
KIND, TRACKERS = "KIND[:WHERE]", "tensorboard[:DIR], wandb[:online] or mlflow[:URI]; may be repeated."


def demo(
    folder: Annotated[Path, out_option("Folder of the runs and the report.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of class order, heads and batches.")] = 1993,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two images per class, only to see that everything works.")
    ] = False,
) -> None:
    """Learn the embedded digits with five methods, and show how much each forgets.

    Takes about a minute on two CPU cores, offline; methods run in parallel. The same command resumes after an
    interruption.
    """
    from cofima.experiment.grid.executors.local import LocalExecutor

    side_by_side = min(os.cpu_count() or 1, DEMO_CELLS)
    executor = LocalExecutor(side_by_side)
    executor.warm_up()  # in parallel with this process, which now imports torch itself
    with interruptible():
        try:
            from cofima.experiment.demo import demo as learn_demo

            with watching(out(), progress()) as watch:
                outcome = learn_demo(folder, executor, watch, seed=seed, quick=quick)
        finally:
            executor.stop()
    print_outcome(outcome)
    say(f"\nFigures: {folder / 'report.html'}")
    say(
        "Try next:\n"
        "  cofima run demo.yaml options.classifier=lda options.drift=linear model.layers=all "
        f"--out {folder / 'beyond'}\n"
        f"  cofima report {folder}\n"
        "  cofima show cofima\n"
        "  cofima run demo.yaml dataset=folder:PATH_TO_YOUR_IMAGES data.max_train_per_class=50"
    )


def run(
    config: Annotated[str, typer.Argument(help="A YAML file, or a packaged recipe: demo.yaml, paper.yaml.")],
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, out_option("The model folder; by default named after the run, in runs/.")
    ] = None,
    skip_unreadable: SkipUnreadable = False,
    data_root: DataRoot = None,
    track_with: Annotated[list[str] | None, typer.Option("--track", metavar=KIND, help=TRACKERS)] = None,
) -> None:
    """Learn a stream of tasks; the same command resumes after a crash."""
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
    """Send a run to TensorBoard, Weights & Biases or MLflow: on disk, unless you name a server."""
    from cofima import report
    from cofima.experiment import trackers

    chosen = trackers.choose(to, folder, report.read(folder).config)
    lines = trackers.replay(chosen, folder)
    say(f"{lines} lines of {folder / 'metrics.jsonl'} to {', '.join(to)}")
