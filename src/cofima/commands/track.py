"""``cofima track``: a run shown by a tracker."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cofima import report, trackers
from cofima.commands.console import say
from cofima.config import Config
from cofima.experiment.journal import Listener

KIND, HELP = "KIND[:WHERE]", "tensorboard[:DIR], wandb[:online] or mlflow[:URI]; may be given again."
TrackWith = Annotated[list[str] | None, typer.Option("--track", metavar=KIND, help=HELP)]


def track(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.")],
    to: Annotated[
        list[str],
        typer.Option("--to", metavar=KIND, help=HELP),
    ],
) -> None:
    """Show a run in TensorBoard, Weights & Biases or MLflow: on disk, unless you name a server."""
    chosen = trackers.choose(to, folder, report.read(folder).config)
    count = trackers.replay(chosen, folder)
    say(f"{count} lines of {folder / 'metrics.jsonl'} to {', '.join(to)}")


def tracked(
    wanted: list[str], config: Config, folder: Path, work: Callable[[Sequence[Listener]], Any]
) -> None:
    """Do work that trackers listen to; a run that was finished already is shown to them as it is."""
    chosen = trackers.choose(wanted, folder, config.model_dump(mode="json"))
    heard: list[None] = []
    counted: list[Listener] = [lambda _: heard.append(None)] if chosen else []
    try:
        work([*chosen, *counted])
        if chosen and not heard:
            trackers.replay(chosen, folder)
    finally:
        for tracker in chosen:
            tracker.close()
