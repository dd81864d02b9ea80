"""A task learned once more, from the state before it, to see what a run does not keep.

A run is reproducible bit for bit, so the weights that training led to, before they were merged, need not
be kept: learning the task again gives them back. Whether it did is checked against what the run kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from cofima import generations, methods, store
from cofima.analyse.kept import KeptRun
from cofima.config import check
from cofima.data import datasets
from cofima.data.stream import Stream, Task
from cofima.errors import CofimaError
from cofima.experiment.launch import load_stream, refuse_other_images
from cofima.methods.base import Method
from cofima.methods.coma import CoMA
from cofima.methods.slca import SLCA
from cofima.progress import Progress
from cofima.store import Model
from cofima.training.sgd import Context
from cofima.weights.pieces import Weights, snapshot


@dataclass
class Relearned:
    """What happened in a task: weights before it, after training, and after merging.

    Attributes:
        before: The model as it was before the task; never changed.
        seen: The tasks up to this one.
        old: The whole network before the task, θ*_{t-1}.
        trained: The whole network after training, θ_t.
        merged: The whole network after the task, θ*_t.
        lam: The share of the new weights that the method took, or none.
        fisher_old: The Fisher information that the method kept from before, where it keeps any.
        fisher_new: The Fisher information of the trained weights, where the method measures it.
        random: The state of chance after training.
    """

    run: KeptRun
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
        """Return the task itself."""
        return self.seen[-1]

    def merge_again(self, lam: float) -> Model:
        """Return the model with the task merged at ``lam``, aligned as the method does; train nothing."""
        model = store.copy(_with_share(self.before, lam), self.before.method.context.progress)
        method, measured = model.method, [self.fisher_new]
        if isinstance(method, CoMA):  # Fisher information of θ_t is known; of θ*_t only the next task needs
            _replace(method, "measured_fisher", lambda task: measured.pop() if measured else {})
            _replace(method, "weighted_fisher", lambda task: measured.pop() if measured else {})
        _replace(method, "train", self._trained(method, self.trained))
        method.learn(self.task)
        return model

    def align_at(self, weights: Weights) -> Model:
        """Return the model with these weights in place of the merged ones, aligned as the method does."""
        model = store.copy(self.before, self.before.method.context.progress)
        method = model.method
        assert isinstance(method, SLCA)
        _replace(method, "train", self._trained(method, weights))
        _replace(method, "end", lambda task: SLCA.end(method, task))
        method.learn(self.task)
        return model

    def _trained(self, method: Method, weights: Weights) -> Callable[[Task], None]:
        """Return what stands in for training: its result, and the state of chance after it."""

        def train(task: Task) -> None:
            method.net.load_state_dict(weights)
            method.net.eval()
            torch.set_rng_state(self.random)

        return train


def relearn(run: KeptRun, task: int, progress: Progress) -> Relearned:
    """Learn a task again from the state before it, and keep what the run did not."""
    generation = run.generation(task - 1)
    after = run.generation(task)
    before = store.load(run.folder, where=run.config.device, progress=progress, generation=generation)
    found = Relearned(run, before, _stream(run, progress)[:task])
    method = store.copy(before, progress).method
    found.old, found.fisher_old = snapshot(method.net), getattr(method, "fisher_old", {})
    _watch(method, found)
    with progress.stage(f"{method.label}: task {task} again"):
        method.learn(found.task)
    found.merged, found.lam = snapshot(method.net), method.facts["lam"]
    _compare(found, method, load_file(after / generations.WEIGHTS), progress)
    return found


def load_tasks(run: KeptRun, progress: Progress) -> tuple[Context, Stream]:
    """Return what the run learns with, and its tasks so far."""
    model = store.load(run.folder, where=run.config.device, progress=progress)
    return model.method.context, _stream(run, progress)[: run.tasks]


def refuse_unsuited(run: KeptRun) -> None:
    """Refuse methods whose tasks do not lead from one network to the next on a straight line."""
    if not _moves(run.config.method):
        suited = [name for name in methods.names() if _moves(name)]
        raise CofimaError(
            f"{run.folder} is a run of {run.config.method}, whose backbone stays as it is or whose old rows "
            f"of the head move; this analysis is for: {', '.join(suited)}"
        )


def _moves(name: str) -> bool:
    method = methods.find(name)
    return (
        name != "joint" and method.frozen_old_heads and not (method.frozen_backbone or method.fixed_features)
    )


def _stream(run: KeptRun, progress: Progress) -> Stream:
    absent = datasets.missing(run.config.dataset, run.config.data)
    if absent:
        raise CofimaError(absent)
    stream = load_stream(run.config, run.facts, progress)
    refuse_other_images(run.data, stream.facts, run.config.dataset, run.folder)
    return stream


def _watch(method: Method, found: Relearned) -> None:
    """Have a method hand over what it has after training, and the Fisher information it measures then."""
    train = method.train

    def watched(task: Task) -> None:
        train(task)
        found.trained, found.random = snapshot(method.net), torch.get_rng_state()

    _replace(method, "train", watched)
    for name in ("measured_fisher", "weighted_fisher"):
        if hasattr(method, name):
            _replace(method, name, _first(getattr(method, name), found))


def _first(measure: Callable[[Task], Weights], found: Relearned) -> Callable[[Task], Weights]:
    def measured(task: Task) -> Weights:
        fisher = measure(task)
        if not found.fisher_new:  # later ones are of the merged weights
            found.fisher_new = fisher
        return fisher

    return measured


def _replace(method: Method, hook: str, by: Callable[[Task], object]) -> None:
    """Put a function in place of a hook, for this one object."""
    vars(method)[hook] = by


def _with_share(model: Model, lam: float) -> Model:
    """Return the model with another share of the new weights in its configuration."""
    options = model.config.options | {"lam": lam}
    if model.config.method == "cofima" and model.config.options["lam"] == "auto":
        options["fisher_history"] = "accumulate"  # as auto sums it
    values = model.config.model_dump(mode="json") | {"options": options}
    return replace(model, config=check(values))


def _compare(found: Relearned, method: Method, kept: Weights, progress: Progress) -> None:
    """Say so where learning again gave other weights than the run: another machine, or more threads."""
    now = method.net.backbone.state_dict()
    if not all(torch.equal(value.cpu(), kept[key]) for key, value in now.items()):
        progress.say(
            f"note: task {found.task.index + 1} learned again gave other weights than {found.run.folder} "
            "keeps (another machine, number of threads or version); shown is what was learned again"
        )
