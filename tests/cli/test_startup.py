"""Commands import what they need and no more, seen from real processes: torch and timm take seconds."""

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


def imported(*arguments: str | Path) -> set[str]:
    """Return the packages that a Python process imports, and fail where it fails."""
    environment = {**os.environ, "COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "cofima" in names
    return names


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    folder = tmp_path_factory.mktemp("startup") / "run"
    tiny.run(folder, tiny.config("seq_ft", train={"epochs": 1}), tiny.stream((2, 1), per_class=6))
    return folder


def test_importing_the_package_is_cheap() -> None:
    assert not imported("-c", "import cofima; dir(cofima)") & HEAVY


def test_every_help_is_cheap_and_ends_with_an_example() -> None:
    assert not imported("-c", EVERY_HELP) & HEAVY
    # what is imported before a command begins delays its first line: a second at most
    assert not imported("-m", "cofima", "--version") & (HEAVY | {"pydantic", "jinja2"})


def test_looking_at_a_model_and_undoing_need_no_torch(run: Path) -> None:
    assert not imported("-m", "cofima", "history", run) & HEAVY
    assert not imported("-m", "cofima", "undo", run) & HEAVY


def test_reporting_needs_no_torch(run: Path, tmp_path: Path) -> None:
    assert not imported("-m", "cofima", "report", run, "--format", "md") & HEAVY
    written = imported("-m", "cofima", "report", run, "--out", tmp_path)
    assert "matplotlib" in written  # which draws the figures
    assert not written & {"torch", "timm", "torchvision", "sklearn", "pandas", "gradio"}


def test_describing_methods_needs_torch_but_not_timm() -> None:
    found = imported("-c", DESCRIBED)
    assert "torch" in found  # the check sees what is imported
    assert not found & {"timm", "torchvision", "matplotlib", "sklearn", "scipy", "pandas", "gradio"}
