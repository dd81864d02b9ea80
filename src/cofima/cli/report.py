"""``cofima report``: tables and figures of runs."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cofima.cli.console import out_option, print_runs, say
from cofima.core.atomic import write_texts


class Paper(StrEnum):
    """The tables of the paper."""

    one = "1"
    two = "2"
    three = "3"
    scratch = "scratch"


class Format(StrEnum):
    """File formats of a table."""

    md = "md"
    tex = "tex"
    csv = "csv"
    html = "html"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders of those, or studies (.jsonl).")],
    folder: Annotated[Path | None, out_option("Folder for report.md, .csv, .tex and .html.")] = None,
    tables: Annotated[
        list[Paper] | None,
        typer.Option("--table", help="A table of the paper with your runs in it; may be repeated."),
    ] = None,
    formats: Annotated[
        list[Format] | None,
        typer.Option("--format", help="Print, or with --out write, only this format; may be repeated."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="METHOD|best", help="Test all rows against this one, paired over seeds."),
    ] = None,
) -> None:
    """Print and write tables and figures of runs: mean and standard deviation over seeds.

    With --table, the layout is the paper's, and its numbers are shown below yours. Runs with another protocol
    are listed separately, with the settings that differ.
    """
    from cofima import report as reports
    from cofima.report.output import tests_of
    from cofima.report.render import markdown

    found = reports.find(runs)
    printed = bool(tables or formats) and folder is None
    wanted = [each.value for each in formats or []] or (["md"] if printed else [])
    if tables:
        from cofima.experiment.config import paper_settings  # imports torch, which other reports do not need

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
