"""Commands import what they need and no more, seen from real processes: torch and timm take seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = {"torch", "timm", "torchvision", "matplotlib", "sklearn", "scipy", "pandas", "gradio", "numpy", "PIL"}
EVERY_HELP = """
import typer
from typer.testing import CliRunner
from cofima.cli.main import app

def paths(command, path=()):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*path, name))

found = list(paths(typer.main.get_command(app)))
assert len(found) > 30, found
for path in found:
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0, shown.output
    last = shown.output.strip().splitlines()[-1].strip()
    assert last.startswith(" ".join(["Example: cofima", *path])), last
"""
DESCRIBED = """
from typer.testing import CliRunner
from cofima.cli.main import app

for words in (["list", "methods"], ["show", "cofima"], ["show", "l2p"]):
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
"""
LOOKED = """
from typer.testing import CliRunner
from cofima.cli.main import app

for words in (["history"], ["report", "--format", "md"], ["undo"]):
    shown = CliRunner().invoke(app, [*words, sys.argv[1]])
    assert shown.exit_code == 0, shown.output
"""
LIGHT = """
import importlib, json, sys

HEAVY = {"torch", "timm", "matplotlib", "scipy", "cofima.methods", "cofima.experiment.config"}
found = {}
for module in (
    *("cofima.store.config", "cofima.store.history", "cofima.store.model_folder", "cofima.report"),
    *("cofima.data.options", "cofima.training.options"),
    "cofima.experiment.grid.executors.local",  # processes start, and import torch, while this one does
):
    importlib.import_module(module)
    found[module] = sorted(HEAVY & {*sys.modules})
print(json.dumps(found))
"""
AT_ITS_END = """
import atexit, sys
atexit.register(lambda: print("imported:", *sys.modules, file=sys.stderr))
"""
COMMAND = """
import runpy
sys.argv = ["cofima", *sys.argv[1:]]
runpy.run_module("cofima", run_name="__main__", alter_sys=True)
"""


def imported(code: str, *words: str | Path) -> set[str]:
    """Return the packages that a Python process imports, and fail where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ITS_END + code, *map(str, words)],
        env={**os.environ, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = {name.partition(".")[0] for name in done.stderr.rpartition("imported: ")[2].split()}
    assert "cofima" in names
    return names


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    folder = tmp_path_factory.mktemp("startup") / "run"
    tiny.run(folder, tiny.config("seq_ft", train={"epochs": 1}), tiny.stream((2, 1), per_class=6))
    return folder


def test_importing_the_package_is_cheap() -> None:
    assert not imported("import cofima; dir(cofima)") & HEAVY


def test_settings_and_results_are_read_and_processes_started_without_torch() -> None:
    """Modules are imported one after the other; the first after which something is there is to blame."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 7
    assert {module: names for module, names in found.items() if names} == {}


def test_every_help_is_cheap_and_ends_with_an_example() -> None:
    assert not imported(EVERY_HELP) & HEAVY
    # what is imported before a command begins delays its first line: a second at most
    assert not imported(COMMAND, "--version") & (HEAVY | {"pydantic", "jinja2"})


def test_looking_at_a_model_and_undoing_need_no_torch(run: Path) -> None:
    assert not imported(LOOKED, run) & HEAVY


def test_reporting_needs_no_torch(run: Path, tmp_path: Path) -> None:
    written = imported(COMMAND, "report", run, "--out", tmp_path)
    assert "matplotlib" in written  # which draws the figures
    assert not written & {"torch", "timm", "torchvision", "sklearn", "pandas", "gradio"}


def test_describing_methods_needs_torch_but_not_timm() -> None:
    found = imported(DESCRIBED)
    assert "torch" in found  # the check sees what is imported
    assert not found & {"timm", "torchvision", "matplotlib", "sklearn", "scipy", "pandas", "gradio"}
