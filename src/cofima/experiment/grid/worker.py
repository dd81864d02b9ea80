"""Execution of one job in a worker process, with its output logged in the job's folder."""

import gc
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from cofima.core.atomic import open_append
from cofima.core.errors import CofimaError
from cofima.core.lock import folder_lock
from cofima.core.progress import Progress
from cofima.core.system import reset_peak_memory
from cofima.experiment.grid import shared_first_task
from cofima.experiment.grid.executors.base import Job
from cofima.experiment.launch import launch

LOG = "log.txt"
EVERY = 30.0  # minimum seconds between log lines of one progress bar
PATIENCE = 60.0  # seconds to wait for the lock of a process that is being killed

T = TypeVar("T")


def learn(job: Job) -> str | None:
    """Run a job; return None or an error message. The process can run another job afterwards."""
    refresh()
    torch.set_num_threads(job.threads or 1)
    try:
        with logged(job.folder):
            return _learn(job)
    except OSError as error:
        return f"{job.folder / LOG} could not be written ({error.strerror})"


def _learn(job: Job) -> str | None:
    log = Log()
    log.say(_who(job))
    try:
        with folder_lock(job.folder, PATIENCE):
            if job.first is not None:
                _take(job.first, job, log)
            launch(job.config, job.folder, log, tasks=job.tasks)
    except CofimaError as error:
        log.say(f"failed: {error}")
        return str(error)
    except KeyboardInterrupt as error:  # raised by a signal, after the checkpoint was saved
        log.say(f"interrupted; {error}")
        raise SystemExit(128 + getattr(error, "signal", signal.SIGINT)) from None
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    log.say("done")
    return None


def _take(first: Path, job: Job, log: Progress) -> None:
    """Start from a shared first task, if it can be read."""
    try:
        if shared_first_task.take(first, job.config, job.folder):
            log.say(shared_first_task.NOTE)
    except (CofimaError, OSError) as error:
        log.say(f"the first task that others share is learned here once more: {error}")


def refresh() -> None:
    """Free the memory of the previous job, and reset the peak memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    reset_peak_memory()


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Redirect all output of this process, including native code, to the log in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open_append(folder / LOG) as file:
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    try:
        yield
    finally:
        with suppress(OSError):  # the disk is full
            sys.stdout.close()
        sys.stdout, sys.stderr = streams
        for number, old in enumerate(saved, start=1):
            os.dup2(old, number)
            os.close(old)


class Log(Progress):
    """Progress as log lines with timestamps."""

    def say(self, message: str) -> None:
        """Write a line; a full disk is ignored, as the log must not stop the job."""
        with suppress(OSError):
            print(time.strftime("%Y-%m-%d %H:%M:%S"), message, flush=True)

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """Yield ``items``, and log from time to time how many are done."""
        said = time.monotonic()
        for done, item in enumerate(items, start=1):
            yield item
            if time.monotonic() - said > EVERY:
                said = time.monotonic()
                self.say(f"{label}: {done} of {total}")

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Log the start of a stage."""
        self.say(label)
        yield


def _who(job: Job) -> str:
    device = os.environ.get("CUDA_VISIBLE_DEVICES")
    place = f"{platform.node()}, process {os.getpid()}, {torch.get_num_threads()} thread(s)"
    return f"{job.folder.name} on {place}" + (f", CUDA_VISIBLE_DEVICES={device}" if device else "")
