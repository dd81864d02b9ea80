"""Cells on this machine: worker processes that run one job after another, with GPUs assigned in turn."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from cofima.core.system import OUT_OF_MEMORY
from cofima.experiment.grid.executors.base import Ended, Executor, Job

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext  # not on Windows

READY = "ready"
GRACE = 30.0  # seconds to finish the current step and save a checkpoint


def worker_context() -> "ForkServerContext | SpawnContext":
    """Return the start method of workers: forked from a server process that has already imported torch.

    Where forking is unsafe or impossible, each worker is a new Python process, whose imports take seconds.
    """
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["cofima.experiment.grid.worker"])
    return context


class Worker:
    """A process that runs the jobs it receives over a pipe."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.job: Job | None = None
        self.began = time.monotonic()
        context = worker_context()
        self.pipe, theirs = context.Pipe()
        work = (theirs, device, dict(os.environ))
        self.process: BaseProcess = context.Process(target=_serve, args=work, daemon=True)
        self.process.start()
        theirs.close()


class LocalExecutor(Executor):
    """A pool of processes that each run many jobs; one that dies fails only its current job."""

    def __init__(self, workers: int, devices: Sequence[str] = (), threads: int | None = None) -> None:
        super().__init__(workers)
        self.workers: list[Worker] = []
        # devices of workers that are not running: not yet, or no longer
        self.free = [devices[at % len(devices)] if devices else None for at in range(workers)]
        self.threads = threads or max(1, (os.cpu_count() or 1) // workers)
        self.startups: list[float] = []  # seconds from the start of each process until it accepts jobs
        self.seconds: list[float] = []  # seconds that each job took in its process

    def warm_up(self) -> None:
        """Let another process import torch before there are jobs, in parallel with this one."""
        if isinstance(worker_context(), SpawnContext):
            self.workers.append(Worker(self.free.pop(0)))
        else:
            forkserver.ensure_running()

    def has_room(self) -> bool:
        """Return True if a worker is idle or another one may be started."""
        return self._idle() is not None or bool(self.free)

    def start(self, job: Job) -> None:
        """Send the job to an idle worker, or to a new one."""
        worker = self._idle()
        if worker is None:
            worker = Worker(self.free.pop(0))
            self.workers.append(worker)
        worker.job = job
        with suppress(OSError):  # the worker has just died: ended() will report it
            worker.pipe.send(replace(job, threads=job.resources.cpus or self.threads))

    def _idle(self) -> Worker | None:
        for worker in [worker for worker in self.workers if worker.job is None]:
            if worker.process.is_alive():
                return worker
            self._remove(worker)  # it died while it was idle
        return None

    def ended(self, seconds: float) -> list[Ended]:
        """Wait for results; the job of a process that died has failed."""
        found: list[Ended] = []
        by_pipe = {worker.pipe: worker for worker in self.workers if worker.job is not None}
        for pipe in wait(list(by_pipe), timeout=seconds):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                found.append(self._failed(worker))
                continue
            if answer == READY:
                self.startups.append(time.monotonic() - worker.began)
                continue
            assert worker.job is not None
            fault, took = answer
            found.append(Ended(worker.job, fault))
            self.seconds.append(took)
            worker.job = None
        self.start_queued()
        return found

    def stop(self) -> None:
        """Terminate the processes, which then save checkpoints; kill those that take too long."""
        self.queue.clear()
        for worker in self.workers:
            worker.process.terminate()
        until = time.monotonic() + GRACE
        for worker in self.workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self.workers.clear()

    def _remove(self, worker: Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)
        self.free.append(worker.device)

    def _failed(self, worker: Worker) -> Ended:
        self._remove(worker)
        code, job = worker.process.exitcode or 0, worker.job
        assert job is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        hint = "; if memory ran out, give a smaller --jobs" if code == OUT_OF_MEMORY else ""
        return Ended(job, f"its process {how}{hint}; the tasks that it learned are kept")


def devices() -> list[str]:
    """Return the GPUs visible to this process, as named in CUDA_VISIBLE_DEVICES."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def _serve(pipe: Connection, device: str | None, environment: dict[str, str]) -> None:
    """Run jobs from the pipe until it is closed: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    os.environ.clear()  # a forked worker has the environment of the fork server, which may be outdated
    os.environ.update(environment)
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # before CUDA is initialized
    threading.Thread(target=_die_with_parent, daemon=True).start()
    from cofima.experiment.grid.worker import learn

    with suppress(EOFError, BrokenPipeError):
        pipe.send(READY)
        while True:
            job = pipe.recv()
            start = time.monotonic()
            pipe.send((learn(job), time.monotonic() - start))


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
