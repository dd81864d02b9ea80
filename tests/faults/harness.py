"""Commands with a fault at the n-th call that changes a folder: an error of the disk, or a kill.

``shim.c`` is loaded below everything else, so a fault hits the calls of Python, torch and safetensors alike.
Trials are forked from one process (``server.py``), which takes milliseconds.
"""

import errno
import fnmatch
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cofima.experiment import metrics_log
from cofima.store import model_folder
from cofima.store.generation import CURRENT
from cofima.store.record import HISTORY

HERE = Path(__file__).parent
COUNT, ERROR, KILL = range(3)
USER_ERRORS = (0, 1, 2)
KILLED = -9
SETTINGS = ("train.epochs=1", "data.flip=false", "data.crop=1", "device=cpu", "model.pretrained=false")
RUN = ("run", "demo.yaml", "dataset=blobs", "backbone=vit_test", "train.batch_size=16", *SETTINGS)
RUN += ("data.max_train_per_class=4",)
COLD = "cold"  # an empty cache
PUBLISHED = "published/cifar-100-python.tar.gz"
LEARN = ("--backbone", "vit_test", "val_fraction=0.4", *SETTINGS)
GRID = """
dataset: blobs
backbone: vit_test
model: {pretrained: false}
device: cpu
data: {max_train_per_class: 4, flip: false, crop: 1}
stream: {base_classes: 3, increment: 3}
train: {epochs: 1, batch_size: 16}
method: coma
options: {align: {epochs: 1, samples_per_class: 4}}
grid: {options.lam: [0.2, 0.8]}
"""


@dataclass(frozen=True)
class Fault:
    """A fault at one call, counted from 1; None of them with COUNT."""

    how: int = COUNT
    at: int = 0
    error: int = errno.ENOSPC
    reads: bool = False
    """Count calls that open a file for reading as well."""
    below: str = ""
    """Count only calls that touch this part of the folder."""


@dataclass(frozen=True)
class Outcome:
    """The end of a trial.

    Attributes:
        code: The exit code.
        count: How many calls could have been hit.
        marks: Those by which a generation came into force.
        said: The printed output.
    """

    code: int
    count: int
    marks: list[int]
    said: str


@dataclass(frozen=True)
class Command:
    """A command that writes.

    Attributes:
        words: After ``cofima``; run in a copy of the prepared folder.
        models: The model folders that it may change, or patterns, with the number of classes after it.
        files: The other files that it writes, whole or not at all.
        over: The files are there before, with other content.
        cache: It is given a cache of its own, which is empty. Faults are in building this, and what the
            command makes is made once more from what is in there after a fault.
        checkpoints: It writes the task in progress after every step.
        workers: Other processes work for it, and may be hit in its place.
        published: It fetches a small dataset, by its digest, from a web server on this machine.
        step: Only every so many calls are hit.
    """

    words: Sequence[str]
    models: dict[str, int] = field(default_factory=dict)
    files: Sequence[str] = ()
    over: bool = False
    cache: bool = False
    checkpoints: bool = False
    workers: bool = False
    published: bool = False
    step: int = 1


class State(NamedTuple):
    """A model as it is in force, every file of it verified: two of the same bits are equal."""

    classes: list[str]
    files: dict[str, str]
    serving: dict[str, Any]


EMPTY = State([], {}, {})


class Server:
    """The process that trials are forked from."""

    def __init__(self, place: Path) -> None:
        shim = place / "shim.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "shim.c", "-ldl"], check=True)
        inherited = {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
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

    def run(
        self,
        folder: Path,
        words: Sequence[str],
        fault: Fault | None = None,
        *,
        cache: str = "cache",
        checkpoints: bool = False,
        published: bool = False,
    ) -> Outcome:
        """Run a command in a folder, which may be hit by the fault."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        environment = {"COFIMA_CACHE": str(folder / cache)}
        order: dict[str, Any] = {"words": list(words), "folder": str(folder), "environment": environment}
        order |= {"fault": vars(fault or Fault()), "checkpoints": checkpoints}
        order["published"] = str(folder / PUBLISHED) if published else None
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
        whole = self._copy()
        self.before, self.old = states(whole), self._files(whole)
        done = self._run(whole)
        assert done.code == 0, done.said
        self.calls, self.after, self.names = done.count, states(whole), names(whole)
        self.new, self.logged = self._files(whole), logs(whole)
        self.models = [
            name for pattern in command.models for name in sorted(fnmatch.filter(self.after, pattern))
        ]
        found = {name: len(state.classes) for name, state in self.after.items()}
        wanted = {name: len(state.classes) for name, state in self.before.items()}
        for pattern, number in command.models.items():
            wanted |= dict.fromkeys(fnmatch.filter(self.models, pattern) or [pattern], number)
        assert found == wanted
        assert None not in self.new.values(), f"{self.new.keys()} should be there"
        self._expect_between(done.marks)
        if command.cache:
            self.calls = self._run(self._copy(), Fault(below=COLD)).count

    def _expect_between(self, marks: Sequence[int]) -> None:
        """Learn the states between the one before and the one after: those that come into force on the way.

        And learn which files are the same every time, and are not dated.
        """
        self.between = []
        for mark in marks:
            folder = self._copy()
            self._run(folder, Fault(KILL, mark + 1))
            self.between.append(states(folder))
        again = self._copy()
        assert self._run(again).code == 0
        assert states(again) == self.after, "the same command ends in other bits"
        self.dated = {name for name, content in self._files(again).items() if content != self.new[name]}

    def faults(self) -> Iterator[Fault]:
        """Yield a kill and an error at every call."""
        for at in range(1, self.calls + 1, self.command.step):
            error = errno.EIO if at // self.command.step % 2 else errno.ENOSPC
            for how in (KILL, ERROR):
                yield Fault(how, at, error, below=COLD if self.command.cache else "")

    def check(self, fault: Fault) -> str:
        """Run one trial; return what it did wrong, or nothing."""
        folder = self._copy()
        done = self._run(folder, fault)
        wrong = [*self._wrong_end(done, fault), *self._wrong_content(folder, done)]
        if not wrong and self.command.cache:
            self._remove_made(folder)
        if not wrong and self._is_done(folder):
            wrong += [f"next: {each}" for each in self._wrong_next(folder)]
        elif not wrong:
            wrong += [f"again: {each}" for each in self._wrong_again(folder)]
        return f"{' '.join(self.command.words)}: {fault}: {wrong}" if wrong else ""

    def _wrong_end(self, done: Outcome, fault: Fault) -> Iterator[str]:
        """Yield what is wrong with the exit code and the words."""
        killed = (KILLED, 0, 1) if self.command.workers else (KILLED, 0)
        if done.code not in (killed if fault.how == KILL else USER_ERRORS) or "Traceback" in done.said:
            yield f"code {done.code}, {done.said[-1500:]}"
        elif fault.how == ERROR and done.code and "cofima: " not in done.said:
            yield f"no reason: {done.said[-500:]}"

    def _wrong_content(self, folder: Path, done: Outcome) -> Iterator[str]:
        """Yield what is neither as before nor as after, nor as between; or not as it was said to be."""
        for name, state in states(folder).items():
            known = [self.before, *self.between, self.after]
            if name in self.after and state not in [each.get(name, EMPTY) for each in known]:
                yield f"{name}: neither the state before nor the one after: {state}"
        if not done.code and states(folder) != self.after:
            yield f"said to be done, and is not: {done.said[-300:]}"
        for name, content in self._files(folder).items():
            if name in self.dated and content not in (self.old[name], None):
                if not content or content[-20:] != (self.new[name] or b"")[-20:]:
                    yield f"{name}: not whole"
            elif content not in (self.old[name], self.new[name], None):
                yield f"{name}: neither as before nor as after"
            if not done.code and content in (self.old[name], None):
                yield f"{name}: said to be written, and is not"

    def _wrong_again(self, folder: Path) -> Iterator[str]:
        """Give the same command once more, and yield what is then not as it is without a fault."""
        again = self._run(folder)
        if again.code:
            yield again.said[-1500:]
        if states(folder) != self.after:
            yield f"another state: {states(folder)}, not {self.after}"
        yield from self._wrong_content(folder, again)
        if logs(folder) != self.logged:
            yield f"another log: {logs(folder)}"
        yield from (f"litter {name}" for name in sorted(names(folder) - self.names))

    def _wrong_next(self, folder: Path) -> Iterator[str]:
        """Make another change, and yield what the faulty command left behind in spite of it."""
        for name in self.models:
            done = self.server.run(folder, ("rename", name, self.after[name].classes[0], "another name"))
            if done.code:
                yield done.said[-500:]
            if len(list((folder / name).glob("[0-9]*"))) > 2:
                yield f"{name}: more than two generations"
            theirs = {each for each in names(folder) - self.names if each.startswith(f"{name}/")}
            yield from (f"litter {each}" for each in sorted(theirs))

    def _run(self, folder: Path, fault: Fault | None = None) -> Outcome:
        return self.server.run(
            folder,
            self.command.words,
            fault,
            cache=COLD if self.command.cache else "cache",
            checkpoints=self.command.checkpoints,
            published=self.command.published,
        )

    def _is_done(self, folder: Path) -> bool:
        undone = [name for name, content in self._files(folder).items() if content in (self.old[name], None)]
        return not undone and states(folder) == self.after

    def _files(self, folder: Path) -> dict[str, bytes | None]:
        paths = {name: folder / name for name in self.command.files}
        return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}

    def _copy(self) -> Path:
        """Copy the prepared folder, always to the same place: a model knows where its images were."""
        shutil.rmtree(self.place / "trial", ignore_errors=True)
        folder = Path(shutil.copytree(self.prepared, self.place / "trial"))
        for file in self.command.files if self.command.over else ():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text("of another time\n")
        return folder

    def _remove_made(self, folder: Path) -> None:
        for name in self.models:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in self.command.files:
            (folder / name).unlink(missing_ok=True)


def states(folder: Path) -> dict[str, State]:
    """Return the state of every model below a folder, but for first tasks that the cells of a grid share."""
    found = (path.parent for path in folder.rglob(CURRENT))
    names = (str(path.relative_to(folder)) for path in found)
    return {name: state(folder / name) for name in names if "/." not in name}


def state(folder: Path) -> State:
    generation = model_folder.read(folder)
    generation.verify()
    generation.history()
    files = {name: sha for name, sha in generation.record.files.items() if name != HISTORY}
    return State(generation.record.classes, files, generation.record.serving)


def logs(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return kind, task and epoch of each line of the logs of runs."""
    found = (path.parent for path in folder.rglob(metrics_log.METRICS))
    return {
        str(path.relative_to(folder)): [
            (line["kind"], line["task"], line.get("epoch")) for line in metrics_log.read(path)
        ]
        for path in found
    }


def names(folder: Path) -> set[str]:
    """Return the relative paths of all that is there, but for the numbers of generations."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {"/".join("N" if part.isdigit() else part for part in name.split("/")) for name in found}
