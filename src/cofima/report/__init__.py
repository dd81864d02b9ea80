"""Reports on runs: metrics, tables, figures and HTML pages; imports no torch and only reads files."""

from cofima.report.comparison import Comparison, compare
from cofima.report.output import paper_texts, texts, write
from cofima.report.runs import Run, collect, find, read

__all__ = ["Comparison", "Run", "collect", "compare", "find", "paper_texts", "read", "texts", "write"]
