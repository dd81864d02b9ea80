"""Base class of the SLCA family: a slow learner, weight averaging, and a head fitted to all classes.

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
    empty_head,
    shrink,
)
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.discriminant import (
    DISCRIMINANT,
    GROUPS,
    POWER_DISCRIMINANT,
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
from cofima.training.context import NO_HOOKS, Batch, Hooks
from cofima.weights.ops import Weights

SLOW_LEARNER = "slow learner with Gaussians"  # key of the first task of methods that differ only later


@dataclass(eq=False)
class Aligned(Method):
    """Store a Gaussian of each class's features, and predict with a head fitted to all classes.

    The prediction head is a copy of the trained head, aligned by SGD on features drawn from all Gaussians;
    or it is solved in closed form, from class means and one shared covariance (lda), or from sums of hidden
    features (ridge). Training of the next task continues with the trained head, called the raw head.

    The methods of this family differ in the weights at the end of a task. One that averages weights sets
    ``averages_with`` and overrides :meth:`share` and :meth:`finish` (and :meth:`trained_fisher` if the
    average needs it). Analyses call the same hooks to average again with another share.

    Args:
        align: Options of the alignment; ``epochs`` 0 disables it.
        alignment: Time of the alignment: after each task (each_task), or only after the last planned (end).
        classifier: Prediction head: aligned with drawn features (sgd), linear discriminant analysis (lda),
            or ridge regression on a random projection (ridge). The last two are solved after every task,
            including the first.
        closed_form: Options of lda and ridge.
        drift: Compensation of feature drift in the statistics of old classes: a linear map, estimated on the
            task's images before and after training (linear), or none.
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
        if self.closed_form.features != "raw" and self.classifier != "lda":
            raise ValueError(
                f"closed_form.features={self.closed_form.features}: only for classifier=lda, found "
                f"classifier={self.classifier}"
            )

    can_refine: ClassVar[bool] = True
    can_refine_one_class: ClassVar[bool] = True  # its Gaussian is pooled with the new images
    aligns_head: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = (
        RAW_HEAD,
        GAUSSIANS,
        *DISCRIMINANT,
        *POWER_DISCRIMINANT,
        *READOUT,
    )
    averages_with: ClassVar[str] = ""
    """Weights that the trained ones are averaged with: those before the task (``previous``), or those before
    the first task (``pretrained``); empty for none."""

    @property
    def restarts(self) -> bool:
        """True if every task is trained from the weights before the first task."""
        return False

    @property
    def is_solved(self) -> bool:
        """True for lda, which also has leave-one-out logits in closed form."""
        return self.classifier == "lda"

    @property
    def uses_fisher(self) -> bool:
        """True if :meth:`trained_fisher` computes Fisher information."""
        return False

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries except the statistics that the configured head does not need."""
        lda = {"raw": DISCRIMINANT, "power": POWER_DISCRIMINANT}[self.closed_form.features]
        kept = {"sgd": {GAUSSIANS}, "lda": {*lda}, "ridge": {*DISCRIMINANT, *READOUT}}
        others = {GAUSSIANS, *DISCRIMINANT, *POWER_DISCRIMINANT, *READOUT} - kept[self.classifier]
        return tuple(entry for entry in self.state_schema if entry not in others)

    def head_key(self) -> tuple[Any, ...]:
        """Return everything that the statistics and the head after the first task depend on."""
        if self.classifier == "sgd":
            return (self.align.shrink,)
        return (self.classifier, self.closed_form.model_dump())

    def cost(self, plan: Plan) -> Cost:
        """Add the features for the Gaussians, and those before each later task to measure drift."""
        # features before a task serve both the drift and the rows of new classes
        drifting = plan.later if self.drift == "linear" and not plan.solved_rows else 0
        return super().cost(plan).plus(forward=plan.train + drifting)

    def begin(self, task: Task) -> None:
        """Grow the raw head; prepare to draw old classes' features if a single class is added."""
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
        if len(task.classes) == 1 and task.index > 0 and not self._untrained(task):
            scale = self.mean_scale(task.classes.start)
            self.old_features = Sampler(self.gaussians, self.context.device, scale)
            self.draws = self.context.seeds.generator("single class", task.index)

    def initial_features(self, task: Task) -> Tensor:
        """Return the features that drift is measured with, unless training starts from other weights."""
        if self.before is None or self.restarts:
            return super().initial_features(task)
        return self.before

    def train(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Train on the task's images; a single class trains nothing if no old feature can be drawn."""
        if not self._untrained(task):
            super().train(task, hooks)
            return
        self.note("one new class, and power-normalized features of the others: the backbone stays frozen")
        self.net.eval()

    def _untrained(self, task: Task) -> bool:
        """Return True for a single class if drawn features of old classes do not fit the raw head."""
        return len(task.classes) == 1 and task.index > 0 and self.closed_form.features == "power"

    def mean_scale(self, classes: int) -> Tensor | None:
        """Return SLCA's scale of the means of the first ``classes`` classes; None means 1.

        The scale approximates the drift of old classes. It is 1 if drift is estimated, and closed-form heads
        do not use it.
        """
        if self.classifier != "sgd" or self.drift == "linear":
            return None
        return mean_scale(task_of_class(self.net.head)[:classes])

    def loss(self, batch: Batch) -> Tensor:
        """Return the local loss; for a single new class, add features drawn from old classes."""
        loss = super().loss(batch)
        if len(self.task.classes) == 1:
            # All labels of the batch are the new class: without old classes, its row would win on any image.
            features, classes = self.old_features.draw_any(batch.shard.whole, self.draws)
            loss = loss + cross_entropy(self.net.head(features), classes)
        return loss

    def end(self, task: Task) -> None:
        """Average with the method's own share, store class statistics and align the head."""
        fisher = self.trained_fisher(task)
        self.finish(task, self.share(task, fisher), fisher)

    def trained_fisher(self, task: Task) -> Weights:
        """Return the Fisher information of the trained weights if the average needs it."""
        return {}

    def share(self, task: Task, fisher: Weights) -> float:
        """Return the share of the trained weights in the average; 1 if nothing is averaged."""
        return 1.0

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Finish a task after training.

        Args:
            task: The task.
            lam: Share of the trained weights in the average.
            fisher: Result of :meth:`trained_fisher`.
            last: No task follows: skip work that only the next task needs.
        """
        self.fit_head(task)

    def fit_head(self, task: Task) -> None:
        """Store statistics of the task's classes under the current weights, and fit the prediction head."""
        self.remember(task)
        self.align_head(task)

    def remember(self, task: Task) -> None:
        """Store a Gaussian of each new class's features; pool those of known classes."""
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
        """Return the features of the task's images, from the Fisher pass if the weights did not change."""
        part, passed = distributed.current_shard(len(task.train)), self.passed
        self.passed = None
        found = None if passed is None else passed.all(part.stop - part.start)
        return self.features(task.train) if found is None else part.gather(found)

    def follow(self, features: Tensor, labels: Tensor) -> None:
        """Move the statistics of old classes by the drift estimated on the task's images, if there is any."""
        before, self.before = self.before, None
        if before is None or torch.equal(before, features):
            return
        if isinstance(self.gaussians, SharedGaussians):
            before, features = (self.gaussians.prepare(each).float() for each in (before, features))
        alpha = choose_alpha(before, features, labels)
        self.gaussians.move(drift_map(before, features, alpha))
        one = " (one class: none could be left out)" if len(torch.unique(labels)) < 2 else ""
        self.facts["notes"].append(f"drift of old classes: alpha {alpha:g}{one}")

    def align_head(self, task: Task) -> None:
        """Compute the prediction head; the raw head is kept for the next task."""
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
        """Load the prediction head; :meth:`restore` loads the raw head into the network."""
        sizes = self.net.head.sizes
        if self.classifier == "ridge":
            self.readout = self._empty_readout()
            self.aligned = self.readout.blank.with_blocks(sizes)
        else:
            self.aligned = empty_head(self.net.head.features, sizes, self.closed_form.features)
        self.aligned.to(self.context.device).load_flat(weight, bias)

    def solved_head(self, state: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor] | None:
        """Return the discriminant of these statistics."""
        if not self.is_solved:
            return None
        space = self.closed_form.features
        kept = SharedGaussians.restore(untagged(GROUPS[space], state), width, space)
        return discriminant(kept, self.closed_form.priors)

    def left_out_logits(self, features: Tensor, labels: Tensor) -> Tensor | None:
        """Return the leave-one-out logits of lda, in closed form; None for other heads."""
        if self.classifier != "lda" or not isinstance(self.gaussians, SharedGaussians):
            return None
        how = self.closed_form
        return left_out_logits(self.gaussians, features, labels, how.priors, how.shrinkage == "loo")

    def class_shares(self) -> Tensor | None:
        """Return the share of images per class if lda uses them as priors."""
        return class_shares(self.gaussians.counts, self.closed_form.priors) if self.is_solved else None

    def class_statistics(self) -> Gaussians:
        """Return the Gaussians."""
        return self.gaussians

    def state(self) -> dict[str, Tensor]:
        """Return the Gaussians, the raw head, and the Fisher information and start weights if kept."""
        kept = tagged("raw_head", self.net.head.flat()) | tagged("fisher", self.old_fisher)
        kept |= tagged("start", self.start)
        group = "gaussians" if self.classifier == "sgd" else GROUPS[self.closed_form.features]
        kept |= tagged(group, self.gaussians.state())
        return kept | (tagged("readout", self.readout.state()) if self.classifier == "ridge" else {})

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state`; the prediction head is already loaded."""
        self.net.head.load_flat(**untagged("raw_head", state))
        self.gaussians = self._restored(state)
        if self.classifier == "ridge":
            self.readout.restore(untagged("readout", state))
        self.old_fisher = untagged("fisher", state, self.context.device)
        self.start = untagged("start", state, self.context.device)

    def _restored(self, state: dict[str, Tensor]) -> ClassGaussians | SharedGaussians:
        """Return the Gaussians of a state; without classes if the state is empty."""
        if self.classifier == "sgd":
            return ClassGaussians.restore(untagged("gaussians", state), shrink=self.align.shrink)
        space = self.closed_form.features
        return SharedGaussians.restore(untagged(GROUPS[space], state), self.net.head.features, space)

    def _empty_readout(self) -> RidgeReadout:
        return RidgeReadout(self.net.head.features, self.closed_form, self.context.seeds)
