"""Re-run a task from the checkpoint before it, to recover weights that a run does not keep.

Runs are bit-reproducible, so the weights after training and before the merge need not be stored: re-running
the task recovers them. The result is checked against the weights that the run kept.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cofima import methods
from cofima.analysis.run_folder import RunFolder
from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.data import datasets
from cofima.data.stream import Stream, Task
from cofima.experiment.stream import load_stream, refuse_other_images
from cofima.methods.base import Method, Phase
from cofima.methods.components.aligned import Aligned
from cofima.store import model_folder
from cofima.store.model import Model, copy_model, load_model
from cofima.training.context import Context
from cofima.weights.ops import Weights, snapshot


@dataclass
class Relearned:
    """A re-run task: the weights before it, after training, and after merging.

    Attributes:
        run: The run.
        before: The model before the task; never modified.
        seen: The tasks up to this one.
        old: The network before the task, θ*_{t-1}.
        trained: The network after training, θ_t.
        merged: The network after the task, θ*_t.
        lam: Share of the new weights that the method used, or None.
        fisher_old: Fisher information that the method kept from earlier tasks, if any.
        fisher_new: Fisher information of the trained weights, if the method measures it.
        random: State of the random number generator after training.
    """

    run: RunFolder
    before: Model
    seen: Stream
    old: Weights = field(default_factory=dict)
    trained: Weights = field(default_factory=dict)
    merged: Weights = field(default_factory=dict)
    lam: float | None = None
    fisher_old: Weights = field(default_factory=dict)
    fisher_new: Weights = field(default_factory=dict)
    random: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def task(self) -> Task:
        """The task."""
        return self.seen[-1]

    def columns(self) -> dict[str, object]:
        """Return run, method and task as the first columns of a CSV file."""
        return {"run": str(self.run.folder), "method": self.run.config.method, "task": self.task.index + 1}

    def merge_again(self, lam: float) -> Model:
        """Return the model with the task merged with ``lam`` and aligned, without training."""
        model = self._copy()
        method = averaging(model.method, self.run.folder)
        fisher = dict(self.fisher_new)
        model.method.learn(
            self.task,
            train=self._put(model.method, self.trained),
            end=lambda task: method.finish(task, lam, fisher, last=True),
        )
        return model

    def align_at(self, weights: Weights) -> Model:
        """Return the model with these weights in place of the merged ones, aligned as the method does."""
        model = self._copy()
        method = model.method
        method.learn(self.task, train=self._put(method, weights), end=method.fit_head)
        return model

    def _copy(self) -> Model:
        return copy_model(self.before, self.before.method.context.progress)

    def _put(self, method: Method, weights: Weights) -> Phase:
        """Return a replacement for training that sets its resulting weights and random state."""

        def train(task: Task) -> None:
            method.net.load_state_dict(weights)
            method.net.eval()
            torch.set_rng_state(self.random)

        return train


def relearn(run: RunFolder, task: int, progress: Progress, stream: Stream | None = None) -> Relearned:
    """Re-run a task from the checkpoint before it, and return the weights that the run does not keep.

    ``stream`` is that of :func:`load_tasks`, for callers that re-run several tasks.
    """
    generation = run.generation(task - 1)
    after = run.generation(task)
    before = load_model(run.folder, where=run.config.device, progress=progress, generation=generation)
    found = Relearned(run, before, (stream or _stream(run, progress))[:task])
    method = copy_model(before, progress).method
    found.old = snapshot(method.net)

    def train(task: Task) -> None:
        method.train(task)
        found.trained, found.random = snapshot(method.net), torch.get_rng_state()

    def end(task: Task) -> None:
        if not isinstance(method, Aligned) or not method.averages_with:
            method.end(task)
            return
        found.fisher_old, found.fisher_new = method.old_fisher, method.trained_fisher(task)
        method.finish(task, method.share(task, found.fisher_new), found.fisher_new, last=True)

    with progress.stage(f"{method.label}: task {task} again"):
        method.learn(found.task, train=train, end=end)
    found.merged, found.lam = snapshot(method.net), method.facts["lam"]
    _compare(found, method, model_folder.read(run.folder, after).weights(), progress)
    return found


def load_tasks(run: RunFolder, progress: Progress) -> tuple[Context, Stream]:
    """Return the training context of a run, and its tasks so far."""
    model = load_model(run.folder, where=run.config.device, progress=progress)
    return model.method.context, _stream(run, progress)[: run.tasks]


def averaging(method: Method, folder: Path) -> Aligned:
    """Return the method of a run; raise if it does not average weights after each task."""
    if not isinstance(method, Aligned) or not method.averages_with:
        known = [name for name in methods.names() if getattr(methods.find(name), "averages_with", "")]
        raise CofimaError(
            f"{folder} is a run of {method.label}, which does not average weights after each task; "
            f"this analysis is for: {', '.join(known)}"
        )
    return method


def refuse_unsuited(run: RunFolder) -> None:
    """Raise for methods whose tasks do not move the backbone, or that retrain old rows of the head."""
    if not _moves(run.config.method):
        suited = [name for name in methods.names() if _moves(name)]
        raise CofimaError(
            f"{run.folder} is a run of {run.config.method}, whose backbone stays as it is or whose old rows "
            f"of the head move; this analysis is for: {', '.join(suited)}"
        )


def _moves(name: str) -> bool:
    method = methods.find(name)
    return (
        method.can_extend
        and method.frozen_old_heads
        and not (method.frozen_backbone or method.fixed_features)
    )


def _stream(run: RunFolder, progress: Progress) -> Stream:
    absent = datasets.missing(run.config.dataset, run.config.data)
    if absent:
        raise CofimaError(absent)
    stream = load_stream(run.config, run.facts, progress)
    refuse_other_images(run.data, stream.facts, run.config.dataset, run.folder)
    return stream


def _compare(found: Relearned, method: Method, kept: Weights, progress: Progress) -> None:
    """Print a note if re-running gave other weights than the run: another machine or number of threads."""
    now = method.net.backbone.state_dict()
    if not all(torch.equal(value.cpu(), kept[key]) for key, value in now.items()):
        progress.say(
            f"note: task {found.task.index + 1} learned again gave other weights than {found.run.folder} "
            "keeps (another machine, number of threads or version); shown is what was learned again"
        )
