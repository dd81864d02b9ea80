"""From run folders to metrics, tables, figures and pages; reads files only."""

from cofima.report.beside import texts, write
from cofima.report.formats import csv_text, latex, markdown
from cofima.report.page import html
from cofima.report.runs import Run, find, read
from cofima.report.table import Table, build

__all__ = [
    "Run",
    "Table",
    "build",
    "csv_text",
    "find",
    "html",
    "latex",
    "markdown",
    "read",
    "texts",
    "write",
]
