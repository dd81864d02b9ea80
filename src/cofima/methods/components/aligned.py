"""Base of the SLCA family: a slow learner, averages of weights, and a head aligned with class Gaussians."""

import copy
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.alignment import RAW_HEAD, AlignOptions, align, task_of_class
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.gaussians import GAUSSIANS, ClassGaussians, Sampler, by_class, mean_scale
from cofima.methods.state import Entry, tagged, untagged
from cofima.models.head import Head
from cofima.training.context import Batch
from cofima.weights.ops import Weights

SLOW_LEARNER = "slow learner with Gaussians"  # the first task of all that differ only in what comes later


@dataclass(eq=False)
class Aligned(Method):
    """Remember each class as a Gaussian of its features, and let an aligned copy of the head predict.

    The methods of this family differ in the weights with which a task ends. One that averages them sets
    ``averages_with`` and overrides :meth:`share` and :meth:`finish` (and :meth:`trained_fisher`, where
    the average needs it). Analyses call the same hooks, to average again at another share.

    Args:
        align: Options of the alignment; ``epochs`` 0 leaves it out.
        alignment: After each task (each_task), or only after the last one planned (end).
    """

    align: AlignOptions = field(default_factory=AlignOptions)
    alignment: Literal["each_task", "end"] = "each_task"

    can_refine: ClassVar[bool] = True
    can_refine_one_class: ClassVar[bool] = True  # its Gaussian is pooled with the new images
    aligns_head: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = (RAW_HEAD, GAUSSIANS)
    averages_with: ClassVar[str] = ""
    """Weights that the trained ones are averaged with: ``previous`` are those before the task, ``pretrained``
    those before the first; empty for none."""

    @property
    def restarts(self) -> bool:
        """True if every task is trained from the weights before the first."""
        return False

    @property
    def uses_fisher(self) -> bool:
        """True if :meth:`trained_fisher` measures anything."""
        return False

    def cost(self, plan: Plan) -> Cost:
        """Count the features of the Gaussians."""
        return super().cost(plan).plus(forward=plan.train)

    def begin(self, task: Task) -> None:
        """Grow the raw head, and get old classes' features ready where a single class is added."""
        if task.index == 0:
            self.gaussians = ClassGaussians()
            self.old_fisher, self.start = Weights(), Weights()
        self.aligned: Head | None = None
        super().begin(task)
        if len(task.classes) == 1 and task.index > 0:
            scale = mean_scale(task_of_class(self.net.head)[: task.classes.start])
            self.old_features = Sampler(self.gaussians, self.context.device, scale)
            self.draws = self.context.seeds.generator("single class", task.index)

    def loss(self, batch: Batch) -> Tensor:
        """Return the local cross-entropy; a single new class also competes with old classes' features."""
        loss = super().loss(batch)
        if len(self.task.classes) == 1:
            features, classes = self.old_features.draw_any(batch.shard.whole, self.draws)
            loss = loss + cross_entropy(self.net.head(features), classes)
        return loss

    def end(self, task: Task) -> None:
        """Average at the method's own share, then remember and align."""
        fisher = self.trained_fisher(task)
        self.finish(task, self.share(task, fisher), fisher)

    def trained_fisher(self, task: Task) -> Weights:
        """Return the Fisher information of the trained weights, where the average needs it."""
        return {}

    def share(self, task: Task, fisher: Weights) -> float:
        """Return the share of the trained weights in the average; 1 where nothing is averaged."""
        return 1.0

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """End a task whose training is over.

        Args:
            task: The task.
            lam: Share of the trained weights.
            fisher: What :meth:`trained_fisher` returned.
            last: No task follows: leave out what only the next one needs.
        """
        self.fit_head(task)

    def fit_head(self, task: Task) -> None:
        """Remember the task's classes by features of the present weights, and align the head with all."""
        self.remember(task)
        self.align_head(task)

    def remember(self, task: Task) -> None:
        """Keep a Gaussian of each new class's features; pool those of known classes."""
        with self.timed("statistics"):
            features = by_class(self.features(task.train), task.train.labels)
            for label in task.classes:
                self.gaussians.add(features[label], shrink=self.align.shrink)
            for label in task.known:
                self.gaussians.pool(label, features[label])
        shrunk = self.gaussians.shrunk[task.classes.start : task.classes.stop]
        if any(shrunk):
            self.note(
                f"{sum(shrunk)} of {len(shrunk)} new classes have few images: how their features vary is "
                "partly assumed to be the same in all directions (shrunk covariance, Ledoit-Wolf)"
            )

    def align_head(self, task: Task) -> None:
        """Train a copy of the head on features of all classes; the raw head goes on to the next task."""
        due = self.alignment == "each_task" or task.index + 1 >= self.context.tasks
        if task.index > 0 and due:
            with self.timed("align"):
                self.aligned = align(self.net.head, self.gaussians, self.align, self.context, task.index)

    def head(self) -> Head:
        """Return the aligned head, or the raw one before any alignment."""
        return self.net.head if self.aligned is None else self.aligned

    def class_statistics(self) -> ClassGaussians:
        """Return the Gaussians."""
        return self.gaussians

    def state(self) -> dict[str, Tensor]:
        """Keep the Gaussians, the raw head beside the aligned one, and what the average needs."""
        return (
            tagged("raw_head", self.net.head.flat())
            | tagged("gaussians", self.gaussians.state())
            | tagged("fisher", self.old_fisher)
            | tagged("start", self.start)
        )

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take the predicting head as the aligned one, and put the raw head back below it."""
        self.aligned = copy.deepcopy(self.net.head)
        self.net.head.load_flat(**untagged("raw_head", state))
        self.gaussians = ClassGaussians.restore(untagged("gaussians", state))
        self.old_fisher = untagged("fisher", state, self.context.device)
        self.start = untagged("start", state, self.context.device)
