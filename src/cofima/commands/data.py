"""``cofima data``: look at a dataset before anything is learned from it."""

import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cofima import config as configs
from cofima.commands.console import DataRoot, out, progress
from cofima.data import datasets, sources
from cofima.data.options import DataOptions
from cofima.data.sources.base import Source
from cofima.data.sources.checks import Contents, verify
from cofima.data.sources.split_file import write_manifest
from cofima.errors import CofimaWarning, first_problems

app = typer.Typer(
    no_args_is_help=True,
    help="Check a dataset, or write down exactly what is trained and tested on.",
    epilog="Example: cofima data check cub200",
)

Name = Annotated[str, typer.Argument(help="A name from: cofima list datasets.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options, such as data.layout=raw.")
]


@app.command(epilog="Example: cofima data check cub200 --data-root /datasets")
def check(
    name: Name,
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="List the images, but do not read them.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Say what is expected of a dataset, what was found, and what is wrong with it."""
    options = _options(name, overrides)
    _expected(name)
    source, said = _find(name, options)
    _found(source)
    shared: list[str] = []
    if not quick:
        shared = _read(source).shared
        _print("images", f"all {len(source.train) + len(source.test):,} can be read")
    _warn([*said, *_shared(shared)])
    _print("problems", str(len(said) + bool(shared)) if said or shared else "none")


@app.command(epilog="Example: cofima data prepare imagenet_r data.split_seed=1 --out splits")
def prepare(
    name: Name,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the manifest goes; by default beside the cache.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Check a dataset and write the manifest of its split: every image, its part and its hash.

    Another run takes the same split with data.split_file=MANIFEST.
    """
    source, said = _find(name, _options(name, overrides))
    contents = _read(source)
    path = write_manifest(source, contents, folder)
    _found(source)
    _warn([*said, *_shared(contents.shared)])
    _print("manifest", str(path))


def table() -> Table:
    """Return every dataset: its classes and sizes, and where it was found."""
    shown = Table("name", "what it is", "found", box=None, pad_edge=False)
    for name in datasets.names():
        where = ""
        if name in sources.names():
            copies = sources.copies(name, None)
            where = "\n".join(f"{copy.layout} in {copy.path}" for copy in copies) or "no"
        shown.add_row(name, datasets.describe(name), where)
    return shown


def _options(name: str, overrides: list[str] | None) -> DataOptions:
    return configs.resolve({"dataset": name}, overrides or [], "the command line").data


def _find(name: str, options: DataOptions) -> tuple[Source, list[str]]:
    """List the images, and keep the warnings for the end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CofimaWarning)
        source = datasets.find(name, options, progress())
    return source, [str(one.message) for one in caught if issubclass(one.category, CofimaWarning)]


def _read(source: Source) -> Contents:
    contents = verify(source, progress())
    if contents.faults:
        raise first_problems(f"{source.name} in {source.facts.get('folder', 'memory')}", contents.faults)
    return contents


def _shared(names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"test images that are copies of training images: {', '.join(names[:3])}{more}"]


def _expected(name: str) -> None:
    _print("dataset", f"{name}: {datasets.describe(name)}")
    if name in sources.names():
        about = sources.about(name)
        for variant, (train, test) in about.variants.items():
            _print(
                "expected", f"{variant}: {train:,} training + {test:,} test images, {about.classes} classes"
            )


def _found(source: Source) -> None:
    where = f" in {source.facts['folder']}" if "folder" in source.facts else ""
    layout = f" ({source.facts['layout']})" if "layout" in source.facts else ""
    counts = f"{len(source.train):,} training + {len(source.test):,} test images"
    _print("found", f"{counts}, {len(source.class_names)} classes{where}{layout}")
    _print("split", f"{source.facts['split_id']} (sha256 {source.facts['split_hash']})")


def _warn(said: list[str]) -> None:
    for text in said:
        warnings.warn(text, CofimaWarning, stacklevel=3)


def _print(key: str, text: str) -> None:
    out.print(f"{key:9} {text}", highlight=False, markup=False, soft_wrap=True)
