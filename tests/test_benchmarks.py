"""Pages of benchmarks follow from their stored results, to the byte."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from cofima import report

HERE = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "page"),
    [("desk", "DESK.md"), ("desk_search", "DESK_SEARCH.md"), ("capped", "CAPPED.md"), ("grow", "GROW.md")],
)
def test_a_page_is_what_its_script_writes(name: str, page: str) -> None:
    assert script(name).page() == (HERE / page).read_text("utf-8")


def test_the_readme_quotes_the_measured_table() -> None:
    readme = (HERE.parent / "README.md").read_text("utf-8")
    quoted = re.search(r"\| \| 9 classes .*?\n\n", readme, re.DOTALL)
    assert quoted is not None
    assert quoted[0] in (HERE / "GROW.md").read_text("utf-8")


def test_the_desk_is_read_by_the_report() -> None:
    runs = report.find([HERE / "desk.jsonl"])
    assert len(runs) == 85
    assert all(run.finished for run in runs)
    assert len(report.compare(runs)) == 2  # two backbones
