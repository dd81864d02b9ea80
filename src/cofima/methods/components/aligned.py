"""Base of the SLCA family: a slow learner, averages of weights, and a head made for all classes.

The head is aligned with features drawn from class Gaussians, or solved in closed form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.core import distributed
from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.alignment import RAW_HEAD, AlignOptions, align, task_of_class
from cofima.methods.components.closed_form import (
    READOUT,
    ClosedFormOptions,
    RidgeReadout,
    discriminant_head,
    shrink,
)
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.discriminant import (
    DISCRIMINANT,
    SharedGaussians,
    class_shares,
    discriminant,
    left_out_logits,
)
from cofima.methods.components.drift import choose_alpha, drift_map
from cofima.methods.components.fisher import PassingFeatures
from cofima.methods.components.gaussians import (
    GAUSSIANS,
    ClassGaussians,
    Gaussians,
    Sampler,
    by_class,
    mean_scale,
)
from cofima.methods.state import Entry, tagged, untagged
from cofima.models.head import Head
from cofima.training.context import Batch
from cofima.weights.ops import Weights

SLOW_LEARNER = "slow learner with Gaussians"  # the first task of all that differ only in what comes later


@dataclass(eq=False)
class Aligned(Method):
    """Remember each class as a Gaussian of its features, and let a head made for all classes predict.

    That head is a copy of the trained one, aligned by SGD on features drawn from all Gaussians, or it is
    solved from class means and one covariance that all classes share (lda), or from sums of hidden
    features (ridge). The trained head, the raw one, goes on to the next task.

    The methods of this family differ in the weights with which a task ends. One that averages them sets
    ``averages_with`` and overrides :meth:`share` and :meth:`finish` (and :meth:`trained_fisher`, where
    the average needs it). Analyses call the same hooks, to average again at another share.

    Args:
        align: Options of the alignment; ``epochs`` 0 leaves it out.
        alignment: After each task (each_task), or only after the last one planned (end).
        classifier: The head that predicts: aligned with drawn features (sgd), a linear discriminant analysis
            (lda), or a ridge regression behind a random projection (ridge). The last two are solved after
            every task, the first one too.
        closed_form: Options of lda and ridge.
        drift: Move the statistics of old classes as the features of the task's images moved, by a linear map
            (linear), or leave them as they were (none).
    """

    align: AlignOptions = field(default_factory=AlignOptions)
    alignment: Literal["each_task", "end"] = "each_task"
    classifier: Literal["sgd", "lda", "ridge"] = "sgd"
    closed_form: ClosedFormOptions = field(default_factory=ClosedFormOptions)
    drift: Literal["none", "linear"] = "none"

    def __post_init__(self) -> None:
        if self.drift == "linear" and self.classifier == "ridge":
            raise ValueError(
                "drift=linear: hidden features behind a random projection do not move by a linear map, so "
                "that classifier=ridge cannot follow; take classifier=lda or sgd"
            )
        if self.classifier != "sgd" and (self.alignment == "end" or self.align.epochs == 0):
            raise ValueError(
                f"classifier={self.classifier}: the head is solved after every task, so that neither "
                "alignment=end nor align.epochs=0 can be; they are for classifier=sgd"
            )

    can_refine: ClassVar[bool] = True
    can_refine_one_class: ClassVar[bool] = True  # its Gaussian is pooled with the new images
    aligns_head: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = (RAW_HEAD, GAUSSIANS, *DISCRIMINANT, *READOUT)
    averages_with: ClassVar[str] = ""
    """Weights that the trained ones are averaged with: ``previous`` are those before the task, ``pretrained``
    those before the first; empty for none."""

    @property
    def restarts(self) -> bool:
        """True if every task is trained from the weights before the first."""
        return False

    @property
    def is_solved(self) -> bool:
        """True for a discriminant, which also answers each image as if it had not been there."""
        return self.classifier == "lda"

    @property
    def uses_fisher(self) -> bool:
        """True if :meth:`trained_fisher` measures anything."""
        return False

    def entries(self) -> tuple[Entry, ...]:
        """Return the entries of the statistics that the head needs, and all others."""
        kept = {"sgd": {GAUSSIANS}, "lda": {*DISCRIMINANT}, "ridge": {*DISCRIMINANT, *READOUT}}
        others = {GAUSSIANS, *DISCRIMINANT, *READOUT} - kept[self.classifier]
        return tuple(entry for entry in self.state_schema if entry not in others)

    def head_key(self) -> tuple[Any, ...]:
        """Return everything that the statistics and the head after a first task depend on."""
        if self.classifier == "sgd":
            return (self.align.shrink,)
        return (self.classifier, self.closed_form.model_dump())

    def cost(self, plan: Plan) -> Cost:
        """Count the features of the Gaussians, and those before each later task to see them drift."""
        drifting = plan.later if self.drift == "linear" else 0
        return super().cost(plan).plus(forward=plan.train + drifting)

    def begin(self, task: Task) -> None:
        """Grow the raw head, and get old classes' features ready where a single class is added."""
        if task.index == 0:
            self.gaussians = self._restored({})
            self.old_fisher, self.start = Weights(), Weights()
            if self.classifier == "ridge":
                self.readout = self._empty_readout()
        self.aligned: Head | None = None
        self.before: Tensor | None = None
        self.passed: PassingFeatures | None = None
        if self.drift == "linear" and task.index > 0 and not self.still:  # before any weight changes
            with self.timed("statistics"):
                self.before = self.features(task.train)
        super().begin(task)
        if len(task.classes) == 1 and task.index > 0:
            scale = self.mean_scale(task.classes.start)
            self.old_features = Sampler(self.gaussians, self.context.device, scale)
            self.draws = self.context.seeds.generator("single class", task.index)

    def mean_scale(self, classes: int) -> Tensor | None:
        """Return SLCA's scale of the first classes' means; None for 1.

        The scale stands for the drift of old classes: it is 1 where that is estimated, and a head in closed
        form knows none.
        """
        if self.classifier != "sgd" or self.drift == "linear":
            return None
        return mean_scale(task_of_class(self.net.head)[:classes])

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
        """Remember the task's classes by features of the present weights, and make the head for all."""
        self.remember(task)
        self.align_head(task)

    def remember(self, task: Task) -> None:
        """Keep a Gaussian of each new class's features; pool those of known classes."""
        with self.timed("statistics"):
            features, labels = self.task_features(task), task.train.labels
            self.remembered = features if self.still else None
            self.follow(features, labels)
            mine = by_class(features, labels)
            for label in task.classes:
                self.gaussians.add(mine[label])
            for label in task.known:
                self.gaussians.pool(label, mine[label])
        if isinstance(self.gaussians, SharedGaussians):
            with self.timed("solve"):
                said = shrink(self.gaussians, features, labels, self.closed_form, self.classifier)
                if self.classifier == "ridge":
                    said = self.readout.add(features, labels, len(self.gaussians), task.index)
            self.facts["notes"].append(said)
        elif any(shrunk := self.gaussians.shrunk[task.classes.start : task.classes.stop]):
            self.note(
                f"{sum(shrunk)} of {len(shrunk)} new classes have few images: how these vary is partly "
                "guessed, and more images of them would help"
            )

    def task_features(self, task: Task) -> Tensor:
        """Return the features of the task's images: those that passed since the weights last changed."""
        part, passed = distributed.current_shard(len(task.train)), self.passed
        self.passed = None
        found = None if passed is None else passed.all(part.stop - part.start)
        return self.features(task.train) if found is None else part.gather(found)

    def follow(self, features: Tensor, labels: Tensor) -> None:
        """Move old classes by the drift that the task's images show; they stay where nothing moved."""
        before, self.before = self.before, None
        if before is None or torch.equal(before, features):
            return
        alpha = choose_alpha(before, features, labels)
        self.gaussians.move(drift_map(before, features, alpha))
        one = " (one class: none could be left out)" if len(torch.unique(labels)) < 2 else ""
        self.facts["notes"].append(f"drift of old classes: alpha {alpha:g}{one}")

    def align_head(self, task: Task) -> None:
        """Make the head that predicts; the raw head goes on to the next task."""
        if isinstance(self.gaussians, SharedGaussians):
            with self.timed("solve"):
                sizes = self.net.head.sizes
                if self.classifier == "ridge":
                    self.aligned = self.readout.solved(sizes)
                else:
                    self.aligned = discriminant_head(self.gaussians, self.closed_form, sizes)
                self.aligned.to(self.context.device)
            return
        due = self.alignment == "each_task" or task.index + 1 >= self.context.tasks
        if task.index > 0 and due:
            with self.timed("align"):
                scale = self.mean_scale(len(self.gaussians))
                self.aligned = align(
                    self.net.head, self.gaussians, scale, self.align, self.context, task.index
                )

    def head(self) -> Head:
        """Return the aligned head, or the raw one before any alignment."""
        return self.net.head if self.aligned is None else self.aligned

    def load_head(self, weight: Tensor, bias: Tensor) -> None:
        """Load the head that predicts; :meth:`restore` puts the raw one into the network."""
        sizes = self.net.head.sizes
        if self.classifier == "ridge":
            self.readout = self._empty_readout()
            self.aligned = self.readout.blank.with_blocks(sizes)
        else:
            self.aligned = Head(self.net.head.features, sizes)
        self.aligned.to(self.context.device).load_flat(weight, bias)

    def solved_head(self, state: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor] | None:
        """Return the discriminant of these statistics."""
        if not self.is_solved:
            return None
        kept = SharedGaussians.restore(untagged("discriminant", state), width)
        return discriminant(kept, self.closed_form.priors)

    def left_out_logits(self, features: Tensor, labels: Tensor) -> Tensor | None:
        """Return the answers of a discriminant, in closed form."""
        if self.classifier != "lda" or not isinstance(self.gaussians, SharedGaussians):
            return None
        how = self.closed_form
        return left_out_logits(self.gaussians, features, labels, how.priors, how.shrinkage == "loo")

    def class_shares(self) -> Tensor | None:
        """Return the shares of the images, where a discriminant counts them."""
        return class_shares(self.gaussians.counts, self.closed_form.priors) if self.is_solved else None

    def class_statistics(self) -> Gaussians:
        """Return the Gaussians."""
        return self.gaussians

    def state(self) -> dict[str, Tensor]:
        """Keep the Gaussians, the raw head beside the predicting one, and what the average needs."""
        kept = tagged("raw_head", self.net.head.flat()) | tagged("fisher", self.old_fisher)
        kept |= tagged("start", self.start)
        group = "gaussians" if self.classifier == "sgd" else "discriminant"
        kept |= tagged(group, self.gaussians.state())
        return kept | (tagged("readout", self.readout.state()) if self.classifier == "ridge" else {})

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state` kept; the predicting head is already loaded."""
        self.net.head.load_flat(**untagged("raw_head", state))
        self.gaussians = self._restored(state)
        if self.classifier == "ridge":
            self.readout.restore(untagged("readout", state))
        self.old_fisher = untagged("fisher", state, self.context.device)
        self.start = untagged("start", state, self.context.device)

    def _restored(self, state: dict[str, Tensor]) -> ClassGaussians | SharedGaussians:
        """Return the Gaussians of a state; those of no class if it is empty."""
        if self.classifier == "sgd":
            return ClassGaussians.restore(untagged("gaussians", state), shrink=self.align.shrink)
        return SharedGaussians.restore(untagged("discriminant", state), self.net.head.features)

    def _empty_readout(self) -> RidgeReadout:
        return RidgeReadout(self.net.head.features, self.closed_form, self.context.seeds)
