"""Datasets defined by plugins: functions that list images, registered under a name."""

from collections.abc import Callable
from dataclasses import dataclass

from cofima.core import plugins
from cofima.core.errors import CofimaError
from cofima.data.options import DataOptions
from cofima.data.sources.base import Source

_MARK = "cofima_dataset"
Lister = Callable[[DataOptions], Source]


@dataclass(frozen=True)
class PluginDataset:
    """Dataset of a plugin: description, function that lists its images, and name of the plugin."""

    about: str
    lister: Lister
    plugin: str


def dataset(name: str, about: str) -> Callable[[Lister], Lister]:
    """Decorate a plugin's function as the dataset ``name``; the function lists images without reading them.

    Args:
        name: Name of the dataset, on the command line and in configurations.
        about: One-line description.

    Example::

        @dataset("shapes", "circles and squares, drawn")
        def shapes(options: DataOptions) -> Source: ...
    """

    def mark(lister: Lister) -> Lister:
        setattr(lister, _MARK, (name, about))
        return lister

    return mark


def plugin_datasets() -> dict[str, PluginDataset]:
    """Return the datasets of all plugins by name."""
    found: dict[str, PluginDataset] = {}
    for plugin in plugins.loaded():
        for member in list(vars(plugin.module).values()):
            name, about = getattr(member, _MARK, None) or (None, "")
            if name is None or member.__module__ != plugin.module.__name__:
                continue
            if name in found:
                raise CofimaError(
                    f"plugins {found[name].plugin} and {plugin.name} both have dataset '{name}'"
                )
            found[name] = PluginDataset(about, member, plugin.name)
    return found


def find(name: str, options: DataOptions) -> Source:
    """List the images of a plugin's dataset, with the hash of its split."""
    source = plugin_datasets()[name].lister(options)
    if not isinstance(source, Source):
        raise CofimaError(
            f"dataset '{name}' of a plugin returned {type(source).__name__}, not a cofima.data.Source"
        )
    return source.identified()
