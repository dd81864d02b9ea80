"""The command ``cofima``: its subcommands, global options and plugins."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import cofima
from cofima.cli import analyze, catalog, grid, model, report, run, share, weights
from cofima.cli.console import complain, out, register, set_quiet, show_warnings
from cofima.core import plugins, torchrun
from cofima.core.errors import CofimaError, file_error

PLUGIN = "--plugin"


class PluginGroup(TyperGroup):
    """Command group that loads plugins first, wherever they appear in the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Load the plugins of a command line, then parse the rest."""
        files, rest = split_plugins(args)
        for file in files:
            load_plugin(file)
        return super().parse_args(ctx, rest)


def split_plugins(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the files given by ``--plugin``, and all other words."""
    files: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == PLUGIN:
            file = next(words, None)
            if file is None:
                raise CofimaError(f"{PLUGIN} needs a Python file")
            files.append(file)
        elif word.startswith(f"{PLUGIN}="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    return files, rest


def load_plugin(file: str) -> None:
    """Load a plugin; raise if it defines neither a method nor a dataset."""
    from cofima import methods
    from cofima.data.sources.plugin import plugin_datasets

    name = plugins.load(file).name
    if name not in methods.names() and name not in {each.plugin for each in plugin_datasets().values()}:
        raise CofimaError(
            f"plugin {file} defines no method (a class derived from cofima.methods.Method) and no dataset "
            "(a function with @cofima.data.dataset)"
        )


app = typer.Typer(
    cls=PluginGroup,
    add_completion=False,
    no_args_is_help=True,
    help="Teach a pre-trained image classifier new classes, task after task, without the old images.",
    epilog="Example: cofima demo",
)
register(
    app,
    "cofima",
    (run.demo, "demo --out runs/demo"),
    (run.run, "run demo.yaml method=coma options.lam=0.3 --out runs/coma"),
    (grid.grid, "grid desk.yaml --only seed=1993 --jobs 2"),
    (run.track, "track runs/parts --to tensorboard"),
    (report.report, "report runs/demo --out runs/demo"),
    (model.learn, "learn photos -o parts"),
    (model.extend, "extend parts new_photos --check check_photos --max-drop 1"),
    (model.predict, "predict parts photo.jpg --unknown 0.05"),
    (model.evaluate, "evaluate parts check_photos --out evaluation"),
    (model.history, "history parts"),
    (model.undo, "undo parts"),
    (model.rename, "rename parts screw 'wood screw'"),
    (model.remove_class, "remove-class parts washer"),
    (share.export, "export parts --onnx parts.onnx"),
    (share.card, "card parts -o README.md"),
    (share.push, "push parts my-name/parts --private"),
    (share.serve, "app parts"),
    (weights.fisher, "fisher runs/parts photos -o parts.safetensors"),
    (catalog.list_, "list methods"),
    (catalog.show, "show cofima"),
)
register(
    app, "cofima", (weights.merge, "merge runs/a runs/b -o runs/both --lam 0.5"), cls=weights.ListOptions
)
app.add_typer(catalog.data, name="data")
app.add_typer(analyze.analyze, name="analyze")


def _version(wanted: bool) -> None:
    if wanted:
        out().print(f"cofima {cofima.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        Path | None, typer.Option(help="Python file with a method or datasets; may follow any command.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print results and errors only, no progress.")
    ] = False,
) -> None:
    set_quiet(quiet)
    if torchrun.world_size() > 1 and context.invoked_subcommand != "run":
        raise CofimaError(
            f"cofima {context.invoked_subcommand} runs in one process: start it without torchrun"
        )


def main() -> None:
    """Run the command line; a user error prints one message and exits with code 2."""
    show_warnings()
    try:
        app()
    except CofimaError as error:
        complain(error)
        sys.exit(2)
    except OSError as error:  # not handled elsewhere: a path too long or unreadable, a full disk
        complain(file_error(error.filename or "a file", error))
        sys.exit(2)
