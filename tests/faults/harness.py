"""Commands with a fault at the n-th call that changes a folder: an error of the disk, or a kill.

``shim.c`` is loaded below everything else, so a fault hits the calls of Python, torch and safetensors alike.
Trials are forked from one process (``server.py``), which takes milliseconds.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cofima.store import model_folder
from cofima.store.generation import CURRENT

HERE = Path(__file__).parent
COUNT, ERROR, KILL = range(3)
USER_ERRORS = (0, 1, 2)
KILLED = -9
SETTINGS = ("train.epochs=1", "data.flip=false", "data.crop=1", "device=cpu", "model.pretrained=false")
ALIGN = ("options.align.epochs=1", "options.align.samples_per_class=4")
RUN = ("run", "demo.yaml", "dataset=blobs", "backbone=vit_test", "method=seq_ft", "train.batch_size=16")
RUN += (*SETTINGS, "data.max_train_per_class=4")
LEARN = ("--backbone", "vit_test", *SETTINGS, *ALIGN)


@dataclass(frozen=True)
class Fault:
    """A fault at one call, counted from 1; None of them with COUNT."""

    how: int = COUNT
    at: int = 0
    error: int = errno.ENOSPC
    reads: bool = False
    """Count calls that open a file for reading as well."""


@dataclass(frozen=True)
class Outcome:
    """The end of a trial: exit code, how many calls could have been hit, and what was said."""

    code: int
    count: int
    said: str


@dataclass(frozen=True)
class Command:
    """A command that writes.

    Attributes:
        words: After ``cofima``; run in a copy of the prepared folder.
        models: The model folders that it may change, with the number of classes after it.
        files: The other files that it writes, whole or not at all.
    """

    words: Sequence[str]
    models: dict[str, int] = field(default_factory=dict)
    files: Sequence[str] = ()


class Server:
    """The process that trials are forked from."""

    def __init__(self, place: Path) -> None:
        shim = place / "shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "shim.c", "-ldl"], check=True)
        inherited = {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "COFIMA_FEATURES": "off"}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "server.py"],
            env=dict(os.environ) | inherited,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(self, folder: Path, words: Sequence[str], fault: Fault | None = None) -> Outcome:
        """Run a command in a folder, which may be hit by the fault."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        environment = {"COFIMA_CACHE": str(folder / "cache")}
        order: dict[str, Any] = {"words": list(words), "folder": str(folder), "environment": environment}
        order["fault"] = vars(fault or Fault())
        print(json.dumps(order), file=self._process.stdin)
        return Outcome(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Sweep:
    """All trials of a command: a copy of the prepared folder for each."""

    def __init__(self, server: Server, prepared: Path, place: Path, command: Command) -> None:
        self.server, self.prepared, self.place, self.command = server, prepared, place, command
        self.before = self._states(prepared)
        whole = self._copy("whole")
        done = server.run(whole, command.words)
        assert done.code == 0, done.said
        self.calls, self.after, self.names = done.count, self._states(whole), names(whole)
        found = {name: len(state) for name, state in self.after.items()}
        assert found == {name: len(state) for name, state in self.before.items()} | command.models

    def faults(self) -> Iterator[Fault]:
        """Yield a kill and an error at every call."""
        for at in range(1, self.calls + 1):
            yield Fault(KILL, at)
            yield Fault(ERROR, at, errno.EIO if at % 2 else errno.ENOSPC)

    def check(self, fault: Fault) -> str:
        """Run one trial; return what it did wrong, or nothing."""
        folder = self._copy("trial")
        done = self.server.run(folder, self.command.words, fault)
        wrong = list(self._wrong(folder, done, fault))
        missing = [file for file in self.command.files if not (folder / file).is_file()]
        if not wrong and (missing or self._states(folder) != self.after):
            again = self.server.run(folder, self.command.words)
            wrong += [] if again.code == 0 else [f"again: {again.said[-500:]}"]
            wrong += [] if self._states(folder) == self.after else ["again: another state"]
            wrong += [f"again: litter {name}" for name in names(folder) if name not in self.names]
        return f"{' '.join(self.command.words)}: {fault}: {wrong}" if wrong else ""

    def _wrong(self, folder: Path, done: Outcome, fault: Fault) -> Iterator[str]:
        if fault.how == KILL and done.code not in (KILLED, 0):
            yield f"code {done.code}, {done.said[-500:]}"
        if fault.how == ERROR and (done.code not in USER_ERRORS or "Traceback" in done.said):
            yield f"code {done.code}, {done.said[-1500:]}"
        now = self._states(folder)
        for name, state in now.items():
            between = [self.after[name][:number] for number in range(len(self.after[name]) + 1)]
            if state not in (self.before[name], *between):  # a run is saved after each task
                yield f"{name}: neither the state before nor the one after: {state}"
            if not done.code and state != self.after[name]:
                yield f"{name}: said to be done, and is not: {done.said[-300:]}"
        for file in self.command.files:
            if not done.code and not (folder / file).is_file():
                yield f"{file}: said to be written, and is not"

    def _states(self, folder: Path) -> dict[str, list[str]]:
        return {name: classes(folder / name) for name in {*self.command.models, *known_models(folder)}}

    def _copy(self, name: str) -> Path:
        shutil.rmtree(self.place / name, ignore_errors=True)
        return Path(shutil.copytree(self.prepared, self.place / name))


def known_models(folder: Path) -> list[str]:
    return [path.parent.name for path in folder.glob(f"*/{CURRENT}")]


def classes(folder: Path) -> list[str]:
    """Return the classes of the model in force, every file of it verified; none without one."""
    if model_folder.current(folder) is None:
        return []
    generation = model_folder.read(folder)
    generation.verify()
    generation.history()
    return generation.record.classes


def names(folder: Path) -> set[str]:
    """Return the relative paths of all that is there, but for the numbers of generations."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {"/".join("N" if part.isdigit() else part for part in name.split("/")) for name in found}
