"""Commands that describe methods, backbones, datasets and recipes: list, show and data."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from rich.table import Table

from cofima.cli.console import (
    DataRoot,
    Overrides,
    interruptible,
    out,
    out_option,
    plain_table,
    progress,
    register,
    say,
)
from cofima.core.errors import CofimaError, CofimaWarning, first_problems
from cofima.core.wording import some

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cofima.data.sources.base import Source
    from cofima.data.sources.checks import Contents
    from cofima.methods import Method

WIDE = 150  # minimum columns of a terminal to show timm's names


def list_(
    kind: Annotated[
        Literal["methods", "backbones", "datasets", "recipes"], typer.Argument(help="What to list.")
    ],
    data_root: DataRoot = None,
) -> None:
    """List methods, backbones, datasets or packaged recipes."""
    tables = {"methods": _methods, "backbones": _backbones, "datasets": _datasets, "recipes": _recipes}
    out().print(tables[kind](), highlight=False)


def _methods() -> Table:
    from cofima import methods

    table = plain_table("name", "what it is")
    for name in methods.names():
        method = methods.find(name)
        table.add_row(name, f"{method.label}: {summary(method)}")
    return table


def _backbones() -> Table:
    """Return the backbones with the source of their weights, those that work offline first."""
    from cofima.models import backbone

    wide = out().width >= WIDE
    note = None if wide else f"timm's own names: in a terminal of {WIDE} columns (COLUMNS={WIDE})"
    table = Table(box=None, pad_edge=False, caption=note, caption_justify="left")
    for title in ("name", *["timm name"] * wide, "size", "MB", "pixels", "pre-trained on", "weights"):
        table.add_column(title, overflow="fold", no_wrap=title in ("name", "size", "MB"))
    for entry in sorted(backbone.available(), key=lambda entry: not entry.offline):
        count = entry.parameters
        size = (f"{count / 1e6:.1f} M", f"{count * 4 / 1e6:.0f}") if count else ("", "")
        names = (entry.name, *[entry.timm] * wide)
        table.add_row(*names, *size, str(entry.size), entry.pretraining, entry.where)
    table.add_row("any timm name", *["NAME.TAG"] * wide, "", "", "", "", "hub, or model.checkpoint=FILE")
    table.add_row("hf-hub:OWNER/NAME", *[""] * wide, "", "", "", "", "hub")
    return table


def _datasets() -> Table:
    """Return the datasets with their classes, sizes and folders."""
    from cofima.data import datasets, sources

    table = plain_table("name", "what it is", "cofima data get", "found")
    for name in datasets.names():
        where = fetched = ""
        if name in sources.names():
            plan = sources.info(name).download
            fetched = "" if plan is None else "downloads it" if all(f.url for f in plan.files) else "by hand"
            copies = sources.copies(name, None)
            where = "\n".join(f"{copy.layout} in {copy.path}" for copy in copies) or "no"
        table.add_row(name, datasets.describe(name), fetched, where)
    return table


def _recipes() -> Table:
    """Return the packaged recipes, each with the first sentence of its leading comment."""
    from cofima.experiment import config

    table = plain_table("name", "what it is")
    for name in config.recipes():
        lines = config.recipe_text(name).splitlines()
        comment = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
        table.add_row(name, re.split(r"(?<=[.:]) +(?=[A-Z]|cofima |COFIMA)", comment)[0].rstrip(":"))
    table.caption = "cofima grid NAME learns the whole of one, cofima run NAME key=value a single run"
    table.caption_justify = "left"
    return table


def show(method: Annotated[str, typer.Argument(help="A name from: cofima list methods.")]) -> None:
    """Show a method: equation, paper, and options with their defaults."""
    from cofima import methods

    kind = methods.find(method)
    out().print(f"{kind.label} ({method})", style="bold", highlight=False)
    out().print(f"{summary(kind)}\n\n  {kind.equation}\n\n{kind.paper}\n", highlight=False, markup=False)
    table = plain_table("option", "default", "values", "meaning")
    for option in options(method):
        table.add_row(f"options.{option.name}", option.default, option.values, option.meaning)
    out().print(table if table.row_count else "It has no options of its own.", highlight=False)


@dataclass(frozen=True)
class Option:
    """One option of a method, by its dotted name."""

    name: str
    default: str
    values: str
    meaning: str


def options(method: str) -> list[Option]:
    """Return the options of a method as declared in its code, nested ones by dotted names."""
    from pydantic import BaseModel

    from cofima import methods

    made = methods.build(method)
    hints, meanings = get_type_hints(type(made), include_extras=True), _meanings(type(made))
    found: list[Option] = []
    for field in fields(made):
        name, value = field.name, getattr(made, field.name)
        if isinstance(value, BaseModel):
            found += _nested(value, f"{name}.")
        else:
            found.append(Option(name, _text(value), _values(hints[name]), meanings.get(name, "")))
    return found


def summary(kind: type[Method]) -> str:
    """Return the first line of a method's docstring."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def _nested(owner: BaseModel, prefix: str) -> list[Option]:
    hints = get_type_hints(type(owner), include_extras=True)
    return [
        Option(prefix + name, _text(getattr(owner, name)), _values(hints[name]), field.description or "")
        for name, field in type(owner).model_fields.items()
    ]


def _values(hint: Any) -> str:
    """Return a readable form of a type: ``number | auto``, ``last | accumulate``."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _values(get_args(hint)[0])
    if origin in (Union, UnionType):
        return " | ".join(_values(part) for part in get_args(hint))
    if origin is tuple:
        return f"list of {_values(get_args(hint)[0])}s"
    if origin is Literal:
        return " | ".join(map(str, get_args(hint)))
    return {int: "whole number", float: "number", bool: "true | false", NoneType: "none"}.get(hint, str(hint))


def _meanings(kind: type[Method]) -> dict[str, str]:
    """Read the ``Args:`` in the docstrings of a method and its base classes."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        _, _, listed = (owner.__doc__ or "").partition("Args:\n")
        for name, text in re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", listed, re.MULTILINE):
            found[name] = " ".join(text.split()).replace("``", "")
    return found


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return "none" if value is None else str(value)


Name = Annotated[str, typer.Argument(help="A name from: cofima list datasets.")]


def check(
    name: Name,
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="List the images, but do not read them.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Check a dataset: print the expected and the found images, and all problems."""
    source, wrong = _find(name, overrides)
    _print_expected(name)
    _print_found(source)
    if not quick:
        wrong += _copies(_read(source))
        _print("images", f"all {len(source.train) + len(source.test):,} can be read")
    _warn(wrong)
    _print("problems", str(len(wrong) or "none"))


def prepare(
    name: Name,
    overrides: Overrides = None,
    folder: Annotated[Path | None, out_option("Folder for the manifest; by default in the cache.")] = None,
    data_root: DataRoot = None,
) -> None:
    """Check a dataset and write the manifest of its split: every image with its part and its hash.

    Runs use the same split with data.split_file=MANIFEST.
    """
    from cofima.data.sources.split_file import write_manifest

    source, wrong = _find(name, overrides)
    contents = _read(source)
    path = write_manifest(source, contents, folder)
    _print_found(source)
    _warn([*wrong, *_copies(contents)])
    _print("manifest", str(path))


def get(
    name: Name,
    data_root: DataRoot = None,
    place: Annotated[
        str | None,
        typer.Option("--from", help="Folder or URL with the published files, instead of the official one."),
    ] = None,
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the terms of the dataset, if it has any.")
    ] = False,
) -> None:
    """Download a public dataset from its official site, check it, and unpack it into COFIMA_DATA.

    Interrupted downloads resume. Files are compared with the published digests; without a digest, the numbers
    of images are compared, and the file is reported as unverified.
    """
    from cofima.core.signals import handle_signals
    from cofima.data.obtain import obtain

    root = os.environ.get("COFIMA_DATA")
    if not root:
        raise CofimaError("no folder for datasets: give --data-root FOLDER, or set COFIMA_DATA")
    with handle_signals(), interruptible("what was downloaded is kept, and the same command goes on with it"):
        done = obtain(name, Path(root), place=place, accept_license=accept_license, progress=progress())
    _print_expected(name)
    for file, text in done.files.items():
        _print("file", f"{file}: {text}")
    if not done.files:
        _print("file", "nothing was downloaded: it was there")
    _print_found(done.source)


data = typer.Typer(
    no_args_is_help=True,
    help="Download a dataset, check it, or write the manifest of its training and test images.",
    epilog="Example: cofima data check cub200",
)
register(
    data,
    "cofima data",
    (get, "get cifar100 --data-root /datasets"),
    (check, "check cub200 --data-root /datasets"),
    (prepare, "prepare imagenet_r data.split_seed=1 --out splits"),
)


def _find(name: str, overrides: list[str] | None) -> tuple[Source, list[str]]:
    """List the images; collect warnings, to print them at the end."""
    from cofima.data import datasets
    from cofima.experiment import config

    settings = config.resolve({"dataset": name}, overrides or [], "the command line").data

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CofimaWarning)
        source = datasets.find(name, settings, progress())
    return source, [str(one.message) for one in caught if issubclass(one.category, CofimaWarning)]


def _read(source: Source) -> Contents:
    from cofima.data.sources.checks import verify

    contents = verify(source, progress())
    if contents.faults:
        raise first_problems(f"{source.name} in {source.facts.get('folder', 'memory')}", contents.faults)
    return contents


def _copies(contents: Contents) -> Iterator[str]:
    if contents.shared:
        yield f"test images that are copies of training images: {some(contents.shared, 3)}"
    if contents.similar:
        yield f"test images that look nearly the same as training images: {some(contents.similar, 3)}"


def _print_expected(name: str) -> None:
    from cofima.data import datasets, sources

    _print("dataset", f"{name}: {datasets.describe(name)}")
    if name in sources.names():
        about = sources.info(name)
        for variant, (train, test) in about.variants.items():
            counts = f"{train:,} training + {test:,} test images, {about.classes} classes"
            _print("expected", f"{variant}: {counts}")


def _print_found(source: Source) -> None:
    where = f" in {source.facts['folder']}" if "folder" in source.facts else ""
    layout = f" ({source.facts['layout']})" if "layout" in source.facts else ""
    counts = f"{len(source.train):,} training + {len(source.test):,} test images"
    _print("found", f"{counts}, {len(source.class_names)} classes{where}{layout}")
    _print("split", f"{source.facts['split_id']} (sha256 {source.facts['split_hash']})")


def _warn(wrong: list[str]) -> None:
    for text in wrong:
        warnings.warn(text, CofimaWarning, stacklevel=3)


def _print(key: str, text: str) -> None:
    say(f"{key:9} {text}")
