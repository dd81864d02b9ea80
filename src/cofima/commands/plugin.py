"""``--plugin FILE``, which every command takes: methods and datasets in a file of the user's own."""

from typing import Any

from typer.core import TyperGroup

from cofima import methods, plugins
from cofima.data.sources.plugin import own
from cofima.errors import CofimaError

OPTION = "--plugin"


class WithPlugins(TyperGroup):
    """A group of commands before which plugins are loaded, wherever in the line they are named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Load the plugins that a command line names, and parse the rest of it."""
        files, rest = taken(args)
        for file in files:
            use(file)
        return super().parse_args(ctx, rest)


def taken(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the files that follow ``--plugin``, and all other words."""
    files: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == OPTION:
            file = next(words, None)
            if file is None:
                raise CofimaError(f"{OPTION} needs a Python file")
            files.append(file)
        elif word.startswith(f"{OPTION}="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    return files, rest


def use(file: str) -> None:
    """Load a plugin, and refuse one that brings nothing."""
    plugin = plugins.load(file)
    brings = plugin.name in methods.names() or plugin.name in {each.plugin for each in own().values()}
    if not brings:
        raise CofimaError(
            f"plugin {file} defines no method (a class derived from cofima.methods.Method) and no dataset "
            "(a function with @cofima.data.dataset)"
        )
