"""The command ``cofima`` as a user types it, in this process: starting a new one takes seconds."""

import io
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from cofima.cli.main import main


@dataclass
class Done:
    """Result of a command: its exit code, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_cofima(*words: str | Path, cwd: Path, **environment: str) -> Done:
    """Run the command ``cofima`` in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["cofima", *map(str, words)])
        for key, value in ({"COLUMNS": "200", "HF_HUB_OFFLINE": "1"} | environment).items():
            patch.setenv(key, value)
        with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as stop:
            main()
    code = stop.value.code
    return Done(
        code if isinstance(code, int) else int(code is not None), stdout.getvalue(), stderr.getvalue()
    )


@pytest.fixture(scope="session")
def cofima() -> Callable[..., Done]:
    """Return the function that runs a command in a folder."""
    return run_cofima
