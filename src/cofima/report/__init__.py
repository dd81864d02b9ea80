"""From run folders to metrics, tables, figures and pages; reads files only."""

from cofima.report.comparison import Comparison, compare
from cofima.report.output import paper_texts, texts, write
from cofima.report.runs import Run, collect, find, read

__all__ = ["Comparison", "Run", "collect", "compare", "find", "paper_texts", "read", "texts", "write"]
