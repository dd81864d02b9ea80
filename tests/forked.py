"""Processes of the tests, forked from one that has imported torch and timm: importing them takes seconds.

They are like those of ``subprocess``: with the environment and the folder of who starts them, an exit code,
and a pipe from what they print. Tests of a start itself begin a Python of their own.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

# what a run, the command and the tests' own networks import
PRELOADED = ["cofima.experiment.grid.worker", "cofima.cli.main", "cofima.report", "pytest"]
START = """
import os, runpy, signal, sys
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
os.dup2(stdout.fileno(), 1)
stdout.close()
os.dup2(os.open(stderr, os.O_WRONLY), 2)
sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
signal.signal(signal.SIGINT, signal.default_int_handler)
if words[0] == "-m":
    sys.argv = list(words[1:])
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
"""


def context() -> ForkServerContext:
    """Return what forks processes from one that has imported all that a run needs."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)  # before the first process only
    return made


class Forked:
    """A process that does what ``python WORDS...`` does: ``-m MODULE ...`` or ``FILE ...``."""

    def __init__(
        self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] = os.environ
    ) -> None:
        made = context()
        self._stderr = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - closed with this object
        read, write = made.Pipe(duplex=False)
        known = {"words": [str(word) for word in words], "folder": str(cwd or Path.cwd()), "stdout": write}
        known |= {"environment": dict(env), "stderr": self._stderr.name}
        self._process = made.Process(target=exec, args=(START, known), daemon=True)
        self._process.start()
        write.close()
        self.stdout = os.fdopen(os.dup(read.fileno()))
        read.close()

    @property
    def returncode(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._process.pid or 0, number)

    def wait(self, timeout: float = 300) -> int:
        """Return the exit code when the process has ended."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it still runs after {timeout} s"
        return self._process.exitcode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Return all that the process prints until it ends."""
        said = self.stdout.read()
        self.wait(timeout)
        return said, self._stderr.read()
