"""Datasets that plugins bring: a function that lists the images, under a name of its own."""

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
    """A dataset of a plugin: a line about it, the function that lists its images, the plugin's name."""

    about: str
    lister: Lister
    plugin: str


def dataset(name: str, about: str) -> Callable[[Lister], Lister]:
    """Announce a function of a plugin as the dataset ``name``; it lists images and reads none."""

    def mark(lister: Lister) -> Lister:
        setattr(lister, _MARK, (name, about))
        return lister

    return mark


def plugin_datasets() -> dict[str, PluginDataset]:
    """Return the datasets of all plugins by their names."""
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
    """List the images of a plugin's dataset; its split gets a hash, as any other."""
    source = plugin_datasets()[name].lister(options)
    if not isinstance(source, Source):
        raise CofimaError(
            f"dataset '{name}' of a plugin returned {type(source).__name__}, not a cofima.data.Source"
        )
    return source.identified()
