"""Cells on this machine: processes that stay warm, one job at a time each, one for each GPU."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from cofima.experiment.grid.executors.base import Ended, Job

READY = "ready"
GRACE = 30.0  # seconds for the step in progress, and for writing down where it is


class Worker:
    """A process of its own that learns what it is sent."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.job: Job | None = None
        self.began = time.monotonic()
        self.startup: float | None = None
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()


class Local:
    """As many processes as are wanted, each for many jobs; one that dies costs only its own job."""

    def __init__(self, workers: int, devices: Sequence[str] = (), threads: int | None = None) -> None:
        self.workers: list[Worker] = []
        self.free = [devices[at % len(devices)] if devices else None for at in range(workers)]
        self.threads = threads or max(1, (os.cpu_count() or 1) // workers)
        self.queue: deque[Job] = deque()
        self.slots: int = workers
        self.startups: list[float] = []  # seconds from the start of a process until it takes jobs
        self.seconds: list[float] = []  # that jobs took in their processes

    def submit(self, job: Job) -> None:
        """Give the job to a process that has nothing to do, or keep it until one has."""
        self.queue.append(job)
        self._deal()

    def ended(self, seconds: float) -> list[Ended]:
        """Wait for answers; a process that is gone has failed its job."""
        found: list[Ended] = []
        by_pipe = {worker.pipe: worker for worker in self.workers if worker.job is not None}
        for pipe in wait(list(by_pipe), timeout=seconds):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                found.append(self._bury(worker))
                continue
            if answer == READY:
                worker.startup = time.monotonic() - worker.began
                self.startups.append(worker.startup)
                continue
            assert worker.job is not None
            fault, took = answer
            found.append(Ended(worker.job, fault))
            self.seconds.append(took)
            worker.job = None
        self._deal()
        return found

    def stop(self) -> None:
        """End the processes, once they have written down how far they are; kill those that take long."""
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

    def _deal(self) -> None:
        while self.queue:
            worker = next((w for w in self.workers if w.job is None), None)
            if worker is not None and not worker.process.is_alive():
                self._let_go(worker)  # it died while it had nothing to do
                continue
            if worker is None and not self.free:
                return
            worker = worker or self._hire()
            job = self.queue.popleft()
            worker.job = job
            with suppress(OSError):  # it dies at this moment: ended() will hear of it
                worker.pipe.send(replace(job, threads=job.resources.cpus or self.threads))

    def _hire(self) -> Worker:
        self.workers.append(Worker(self.free.pop(0)))
        return self.workers[-1]

    def _let_go(self, worker: Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        self.workers.remove(worker)
        self.free.append(worker.device)

    def _bury(self, worker: Worker) -> Ended:
        self._let_go(worker)
        code, job = worker.process.exitcode or 0, worker.job
        assert job is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        hint = "; if memory ran out, give a smaller --jobs" if code == -signal.SIGKILL else ""
        return Ended(job, f"its process {how}{hint}; the tasks that it learned are kept")


def devices() -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def _serve(pipe: Connection, device: str | None) -> None:
    """Learn jobs until nobody sends any more; this is all that a process of a grid does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has sent the jobs
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # before CUDA is asked for anything
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
