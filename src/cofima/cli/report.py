"""Commands that read runs: report for tables, and the paper's analyses with their figures."""

import os
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from cofima.analysis.output import Result, ready
from cofima.cli.console import Overrides, interruptible, out_option, print_runs, progress, register, say
from cofima.core.atomic import write_texts
from cofima.core.errors import CofimaError

ANALYZE = "analyze"
RECIPE = "table1.yaml"  # the protocol of the paper
OUT = Path("analysis")
KEPT = "cells that are finished are kept, the same command goes on with the others"


class Paper(StrEnum):
    """The tables of the paper."""

    one = "1"
    two = "2"
    three = "3"
    scratch = "scratch"


class Format(StrEnum):
    """The forms in which a table is written."""

    md = "md"
    tex = "tex"
    csv = "csv"
    html = "html"


class HeadKind(StrEnum):
    """Heads that measure a network between two others."""

    raw = "raw"
    aligned = "aligned"


class Tested(StrEnum):
    """Shares that are learned on all training images and tested."""

    chosen = "chosen"
    all = "all"
    none = "none"


class ChooseBy(StrEnum):
    """Accuracies that choose a share."""

    last = "last"
    inc = "inc"


Out = Annotated[Path, out_option("Where the figures and the CSV file go.")]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Runs = Annotated[list[Path], typer.Argument(help="Run folders that keep all states (keep_checkpoints=true).")]
Head = Annotated[HeadKind, typer.Option("--head", help="The head as trained, or aligned to each network.")]
Task = Annotated[int | None, typer.Option("--task", min=2, help="The task to look at; by default the last.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time; by default one per core.")
]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    folder: Annotated[Path | None, out_option("Where report.md, .csv, .tex and .html go.")] = None,
    tables: Annotated[
        list[Paper] | None,
        typer.Option("--table", help="A table of the paper with your runs in it; may be given again."),
    ] = None,
    formats: Annotated[
        list[Format] | None,
        typer.Option("--format", help="Print, or with --out write, only this form; may be given again."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="METHOD|best", help="Test every row against this one, paired over seeds."),
    ] = None,
) -> None:
    """Print and write one table of runs: mean and standard deviation over seeds, with figures.

    With --table the layout is the paper's, and its numbers stand below yours. Runs of another protocol are
    named apart from it, with what differs.
    """
    from cofima import report as reports
    from cofima.report.output import tests_of
    from cofima.report.render import markdown

    found = reports.find(runs)
    forms = [form.value for form in formats or []]
    printed = bool(tables or formats) and folder is None
    wanted = forms or (["md"] if printed else [])
    if tables:
        texts = reports.paper_texts(found, [table.value for table in tables], paper_settings, against, wanted)
    else:
        texts = reports.texts(found, against, wanted)
    if printed:
        for text in texts.values():
            say(text)
        return
    if not tables:
        print_runs(found)
        for tests in tests_of(reports.compare(found), against):
            say(markdown([tests]))
    place = folder or Path(os.path.commonpath([run.resolve() for run in runs]))
    for path in write_texts(texts, place):
        say(f"Wrote {path}")


@cache
def paper_settings(dataset: str, backbone: str, method: str) -> dict[str, Any]:
    """Return the settings of the paper's protocol; a method of the user's own has no options in it."""
    from cofima import methods
    from cofima.experiment import config

    known = method in methods.names()
    chosen = [f"dataset={dataset}", f"backbone={backbone}", *([f"method={method}"] if known else [])]
    settings = config.read(RECIPE, chosen).model_dump(mode="json") | {"method": method}
    return settings if known else settings | {"options": {}}


def _distance(runs: Runs, out: Out = OUT) -> None:
    """Measure how far apart the weights are after each task, over all of them and per layer."""
    from cofima.analysis.distance import distance

    ready(out)
    _finish(distance(runs, progress()), out)


def _path(
    run: Run,
    out: Out = OUT,
    task: Task = None,
    points: Annotated[int, typer.Option(min=3, help="Networks to measure, the ends among them.")] = 11,
    head: Head = HeadKind.raw,
    images: Annotated[int | None, typer.Option(min=1, help="Test images a task; by default all.")] = None,
) -> None:
    """Measure loss and accuracy from the weights before a task to those after its training."""
    from cofima.analysis.path import path

    ready(out)
    _finish(path(run, task, points, head.value, images, progress()), out)


def _landscape(
    run: Run,
    out: Out = OUT,
    task: Task = None,
    grid: Annotated[int, typer.Option(min=5, help="Networks along each side.")] = 15,
    images: Annotated[int, typer.Option(min=1, help="Test images a task.")] = 200,
    head: Head = HeadKind.raw,
) -> None:
    """Measure the plane through the weights at the start, before a task, and after its training."""
    from cofima.analysis.landscape import landscape

    ready(out)
    _finish(landscape(run, task, grid, images, head.value, progress()), out)


def _trajectories(
    runs: Runs,
    out: Out = OUT,
    grid: Annotated[int, typer.Option(min=0, help="Networks along each side; 0 draws the ways alone.")] = 9,
    images: Annotated[int, typer.Option(min=1, help="Training and test images a task.")] = 60,
) -> None:
    """Draw the ways of runs from one start (the paper's Fig. 2), over what class means reach around them."""
    from cofima.analysis.trajectories import trajectories

    ready(out)
    _finish(trajectories(runs, grid, images, progress()), out)


def _fisher(run: Run, out: Out = OUT, task: Task = None) -> None:
    """Measure Fisher information per layer: how old and new overlap, and which weights each side gets."""
    from cofima.analysis.fisher import fisher

    ready(out)
    _finish(fisher(run, task, progress()), out)


def _lambda(
    what: Annotated[str, typer.Argument(help="A recipe to learn, or a run folder.")],
    overrides: Overrides = None,
    out: Out = OUT,
    lams: Annotated[str, typer.Option(help="Shares of the new weights.")] = "0,.1,.2,.3,.4,.5,.6,.7,.8,.9,1",
    methods: Annotated[str, typer.Option(help="Of a recipe: what learns.")] = "coma,cofima,wise_ft",
    val_fraction: Annotated[
        float, typer.Option(help="Of a recipe: share of training images to choose by.")
    ] = 0.2,
    test: Annotated[Tested, typer.Option(help="Of a recipe: which shares are tested.")] = Tested.chosen,
    by: Annotated[ChooseBy, typer.Option(help="Of a recipe: the accuracy that chooses.")] = ChooseBy.last,
    seeds: Annotated[str, typer.Option(help="Of a recipe: seeds, by default its own.")] = "",
    jobs: Jobs = None,
    task: Task = None,
) -> None:
    """Sweep the share of the new weights.

    A recipe is learned at every share on part of its training images, and the best share is chosen on the
    rest. Of a run, one task is merged at every share, without training.
    """
    from cofima.analysis.share import Sweep, posthoc, sweep

    ready(out)
    shares = _numbers("--lams", lams)
    if Path(what).is_dir():
        if overrides:
            raise CofimaError(f"{what} is a run folder: it is swept as it is, without {' '.join(overrides)}")
        _finish(posthoc(Path(what), shares, task, progress()), out)
        return
    if task is not None:
        raise CofimaError("--task is for a run folder: a recipe is learned with all of its tasks")
    whole = [int(seed) for seed in _numbers("--seeds", seeds)]
    how = Sweep(_words(methods), shares, whole, val_fraction, by.value, test.value)
    with interruptible(KEPT):
        result = sweep(what, overrides or [], how, out, jobs or os.cpu_count() or 1, progress())
    _finish(result, out)


def _backbones(
    what: Annotated[list[str], typer.Argument(help="Run folders, or a recipe and what differs (KEY=VALUE).")],
    out: Out = OUT,
    backbones: Annotated[str, typer.Option(help="Of a recipe: the backbones.")] = "",
    methods: Annotated[str, typer.Option(help="Of a recipe: what learns.")] = "slca,cofima,joint",
    jobs: Jobs = None,
) -> None:
    """Compare methods on different backbones."""
    from cofima.analysis import backbones as compare

    ready(out)
    if Path(what[0]).is_dir():
        _finish(compare.backbones([Path(folder) for folder in what]), out)
        return
    if len(_words(backbones)) < 2:
        raise CofimaError("--backbones: give two or more, with commas between; see: cofima list backbones")
    with interruptible(KEPT):
        many = jobs or os.cpu_count() or 1
        chosen = _words(backbones), _words(methods)
        result = compare.learn_backbones(what[0], what[1:], *chosen, out, many, progress())
    _finish(result, out)


def _scratch(
    recipe: Annotated[str, typer.Argument(help="A recipe to learn.")],
    overrides: Overrides = None,
    out: Out = OUT,
    methods: Annotated[str, typer.Option(help="What learns.")] = "joint,cofima",
    own: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="What differs from scratch; may be given again."),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Compare pre-trained weights with weights from scratch."""
    from cofima.analysis import backbones as compare

    ready(out)
    with interruptible(KEPT):
        many = jobs or os.cpu_count() or 1
        chosen = _words(methods), own or []
        result = compare.scratch(recipe, overrides or [], *chosen, out, many, progress())
    _finish(result, out)


analyses = typer.Typer(
    no_args_is_help=True,
    help="Look into runs as the paper does: each analysis writes a figure and a CSV file.",
    epilog=f"Example: cofima {ANALYZE} path runs/coma",
)
register(
    analyses,
    f"cofima {ANALYZE}",
    (_lambda, "lambda demo.yaml --methods coma,cofima --out lambda"),
    (_backbones, "backbones demo.yaml --backbones vit_micro,resnet10t.c3_in1k"),
    (_scratch, "scratch demo.yaml --own train.backbone_lr_scale=1"),
    (_distance, "distance runs/coma runs/slca --out distance"),
    (_path, "path runs/coma --points 21"),
    (_landscape, "landscape runs/cofima --grid 11 --images 60"),
    (_trajectories, "trajectories runs/fresh runs/mean runs/coma"),
    (_fisher, "fisher runs/cofima"),
)


def _finish(result: Result, folder: Path) -> None:
    """Print and write what an analysis found."""
    for line in result.said:
        say(line)
    for file in result.write(folder):
        say(f"Wrote {file}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError as error:
        raise CofimaError(f"{option} {text}: expected numbers with commas between") from error
