"""The command line: it parses, calls one function, and prints."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

import cofima
from cofima import config as configs
from cofima import demo as demonstration
from cofima import describe, methods, report, torchrun
from cofima.commands import analyse, backbones, data
from cofima.commands.app import app as serve_app
from cofima.commands.card import card
from cofima.commands.console import (
    DataRoot,
    be_quiet,
    complain,
    errors,
    interruptible,
    out,
    print_runs,
    progress,
)
from cofima.commands.evaluate import evaluate
from cofima.commands.export import export
from cofima.commands.extend import extend
from cofima.commands.fisher import fisher
from cofima.commands.forget import forget
from cofima.commands.grid import grid
from cofima.commands.history import history
from cofima.commands.learn import learn
from cofima.commands.merge import WithLists, merge
from cofima.commands.plugin import WithPlugins
from cofima.commands.predict import predict
from cofima.commands.push import push
from cofima.commands.rename import rename
from cofima.commands.report import report_
from cofima.commands.track import TrackWith, track, tracked
from cofima.commands.undo import undo
from cofima.errors import CofimaError
from cofima.experiment.cells import plain_name
from cofima.experiment.launch import launch
from cofima.terminal import show_warnings

app = typer.Typer(
    cls=WithPlugins,
    add_completion=False,
    no_args_is_help=True,
    help="Teach a pre-trained image classifier new classes, task after task, without forgetting.",
    epilog="Example: cofima demo",
)
app.command(epilog="Example: cofima learn photos -o parts")(learn)
app.command(epilog="Example: cofima extend parts new_photos --check check_photos --max-drop 1")(extend)
app.command(epilog="Example: cofima predict parts photo.jpg --unknown 0.05")(predict)
app.command(epilog="Example: cofima evaluate parts check_photos --out evaluation")(evaluate)
app.command(epilog="Example: cofima history parts")(history)
app.command(epilog="Example: cofima undo parts")(undo)
app.command(epilog="Example: cofima rename parts screw 'wood screw'")(rename)
app.command(epilog="Example: cofima forget parts washer")(forget)
app.command(epilog="Example: cofima export parts --onnx parts.onnx")(export)
app.command(epilog="Example: cofima card parts -o README.md")(card)
app.command(epilog="Example: cofima push parts my-name/parts --private")(push)
app.command("app", epilog="Example: cofima app parts")(serve_app)
app.command(epilog="Example: cofima grid desk.yaml --only seed=1993 --jobs 2")(grid)
app.add_typer(data.app, name="data")
app.command(epilog="Example: cofima track runs/parts --to tensorboard")(track)
app.command("report", epilog="Example: cofima report runs/demo --out runs/demo")(report_)
app.add_typer(analyse.app, name="analyse")
app.command(epilog="Example: cofima fisher runs/parts photos -o parts.safetensors")(fisher)
app.command(cls=WithLists, epilog="Example: cofima merge runs/a runs/b -o runs/both --lam 0.5")(merge)


class Kind(StrEnum):
    """What ``cofima list`` can list."""

    methods = "methods"
    backbones = "backbones"
    datasets = "datasets"


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"cofima {cofima.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        Path | None, typer.Option(help="A file of yours with a method or datasets; also after any command.")
    ] = None,
    silent: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print results and errors only, no progress.")
    ] = False,
) -> None:
    be_quiet(silent)
    if torchrun.world_size() > 1 and context.invoked_subcommand != "run":
        raise CofimaError(f"cofima {context.invoked_subcommand} is for one process: leave torchrun out")


@app.command(epilog="Example: cofima demo --out runs/demo")
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where runs and report go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of class order, heads, batches.")] = 1993,
) -> None:
    """Learn the embedded digits with five methods, and show how much each forgets.

    Takes two to three minutes on two CPU cores, offline. The same command continues after an interruption.
    """
    with interruptible():
        runs = demonstration.demo(folder, seed, progress())
    print_runs(runs)
    page = folder / "report.html"
    out.print(f"\nFigures: {page}", highlight=False)
    out.print(
        "Try next:\n"
        f"  cofima run demo.yaml options.lam=auto --out {folder / 'auto'}\n"
        f"  cofima report {folder}\n"
        "  cofima show cofima\n"
        "  cofima run demo.yaml dataset=folder:PATH_TO_YOUR_IMAGES data.limit=50",
        highlight=False,
        markup=False,
    )


@app.command(epilog="Example: cofima run demo.yaml method=coma options.lam=0.3 --out runs/coma")
def run(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or a recipe of the package: demo.yaml, paper.yaml.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="What differs.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The model folder; by default named after the run, in runs/.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out unreadable images and classes, and count them.")
    ] = False,
    data_root: DataRoot = None,
    track_with: TrackWith = None,
) -> None:
    """Learn a stream of tasks; the same command continues after a crash, and says when it is done."""
    changes = [*(overrides or []), *(["data.skip_bad=true"] if skip_bad else [])]
    how = configs.read(config, changes)
    where = folder or Path("runs") / plain_name(how)
    with interruptible():
        tracked(track_with or [], how, where, lambda heard: launch(how, where, progress(), heard))
    print_runs(report.find([where]))
    out.print(f"Model: {where}", highlight=False, markup=False)


@app.command("list", epilog="Example: cofima list methods")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")], data_root: DataRoot = None) -> None:
    """List the methods, the backbones or the datasets there are."""
    table = RichTable("name", "what it is", box=None, pad_edge=False)
    if kind is Kind.methods:
        for name in methods.names():
            method = methods.find(name)
            table.add_row(name, f"{method.label}: {describe.summary(method)}")
    elif kind is Kind.datasets:
        table = data.table()
    else:
        table = backbones.table(out.width)
    out.print(table, highlight=False)


@app.command(epilog="Example: cofima show cofima")
def show(method: Annotated[str, typer.Argument(help="A name from: cofima list methods.")]) -> None:
    """Show a method: its equation, its paper, its options with their defaults."""
    kind = methods.find(method)
    out.print(f"{kind.label} ({method})", style="bold", highlight=False)
    out.print(
        f"{describe.summary(kind)}\n\n  {kind.equation}\n\n{kind.paper}\n", highlight=False, markup=False
    )
    table = RichTable("option", "default", "values", "meaning", box=None, pad_edge=False)
    for option in describe.options(method):
        table.add_row(f"options.{option.name}", option.default, option.values, option.meaning)
    out.print(table if table.row_count else "It has no options of its own.", highlight=False)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    show_warnings(errors)
    try:
        app()
    except CofimaError as error:
        complain(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
