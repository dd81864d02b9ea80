r"""CoMA, Continual Model Averaging.

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977. After task :math:`t > 1`, fine-tuned from :math:`\theta^*_{t-1}` to
:math:`\theta_t`, the network becomes

.. math:: \theta^*_t = (1 - \lambda)\, \theta^*_{t-1} + \lambda\, \theta_t

The rows of new classes are not averaged. Slow learner and classifier alignment as in SLCA.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cofima.data.stream import Task
from cofima.methods.averaging import Averaging
from cofima.methods.base import Share
from cofima.methods.cost import FISHER_PASS, Cost, Plan
from cofima.methods.slca import SLCA, SLOW_LEARNER
from cofima.methods.state import Entry, tagged, untagged
from cofima.parts.batchnorm import refresh_batchnorm, statistics_moved
from cofima.parts.importance import FISHER, FisherOptions, add_fisher, task_fisher, weighted
from cofima.training.sgd import plain_batches
from cofima.weights import Weights, auto_lambda, average, snapshot, weight_distance


@dataclass(eq=False)
class CoMA(Averaging, SLCA):
    """Average the weights before and after each task.

    Args:
        lam: Share of the new weights; 0 keeps the old ones, 1 is SLCA; ``auto`` finds the minimum of
            the two tasks' quadratic losses between them (needs Fisher information).
        fallback: The share where ``auto`` is undefined.
        weight: What a task counts by in the Fisher information summed for ``auto``.
        statistics: Gaussians from the merged weights, or from the trained ones (Algorithm 1 as printed).
        fisher: How Fisher information is estimated.
    """

    lam: Share | Literal["auto"] = 0.4
    fallback: Share = 0.4
    weight: Literal["classes", "samples", "tasks"] = "classes"
    statistics: Literal["merged", "trained"] = "merged"
    fisher: FisherOptions = field(default_factory=FisherOptions)

    label: ClassVar[str] = "CoMA"
    paper: ClassVar[str] = "Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977, Eq. 3"
    state_schema: ClassVar[tuple[Entry, ...]] = (*SLCA.state_schema, FISHER)
    equation: ClassVar[str] = "θ*_t = (1 - λ) θ*_{t-1} + λ θ_t"

    def first_task_key(self) -> tuple[Any, ...]:
        """Depend on the Fisher information kept, if any: nothing is averaged yet."""
        if self.lam == "auto":
            return ("summed fisher", self.fisher.model_dump(), self.weight, self.align.shrink)
        return (SLOW_LEARNER, self.align.shrink)

    def cost(self, plan: Plan) -> Cost:
        """Count the Fisher information, where it is needed."""
        return super().cost(plan).plus(steps=FISHER_PASS * plan.train if self.lam == "auto" else 0)

    def begin(self, task: Task) -> None:
        """Keep the merged weights of the task before; rows of new classes are not in them."""
        self.old = snapshot(self.net)
        if task.index == 0:
            self.fisher_old: Weights = {}
        super().begin(task)

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Merge, then remember and align (or remember first, as Algorithm 1 is printed)."""
        if self.statistics == "trained":
            self.remember(task)
        if task.index > 0:
            self.moved(lam)
            self.merge(lam, fisher)
            self.settle(lam)
        if not last:
            self.keep_fisher(task, fisher)
        del self.old
        if self.statistics == "merged":
            self.remember(task)
        self.align_head(task)

    def share(self, task: Task, fisher: Weights) -> float:
        """Return ``lam``, or what it comes to where it is ``auto``."""
        if self.lam != "auto":
            return self.lam
        if task.index == 0:  # nothing to average with yet
            return 1.0
        return auto_lambda(self.old, self.net.state_dict(), self.fisher_old, fisher, fallback=self.fallback)

    def merge(self, lam: float, fisher: Weights) -> None:
        """Replace the weights by their average with those before the task."""
        new = self.net.state_dict()
        average(self.old, new, lam, out=new)  # in place: the network itself becomes the average

    def moved(self, lam: float) -> None:
        """Write into the history how far training moved the backbone, and what share of it is kept."""
        now = {f"backbone.{name}": value for name, value in self.net.backbone.named_parameters()}
        self.facts |= {"lam": lam, "trained_distance": weight_distance(self.old, now)}
        self.stale = statistics_moved(self.old, self.net.state_dict())

    def settle(self, lam: float) -> None:
        """Estimate batch normalisation anew for merged weights; endpoints have their own already."""
        if 0 < lam < 1 and self.stale:
            refresh_batchnorm(self.net, plain_batches(self.task.train, self.context, "batch norm"))

    @property
    def by_fisher(self) -> bool:
        """Only ``auto`` needs Fisher information."""
        return self.lam == "auto"

    @property
    def old_fisher(self) -> Weights:
        """The sum over the tasks before."""
        return self.fisher_old

    def trained_fisher(self, task: Task) -> Weights:
        """Return the task's Fisher information, times what the task counts."""
        if not self.by_fisher:
            return {}
        with self.timed("fisher"):
            return weighted(task_fisher(self.net, task, self.context, self.fisher), task, self.weight)

    def keep_fisher(self, task: Task, fisher: Weights) -> None:
        """Add the task's Fisher information to the sum."""
        self.fisher_old = add_fisher(self.fisher_old, fisher)

    def state(self) -> Weights:
        """Keep the Fisher information too, where there is any."""
        return super().state() | tagged("fisher", self.fisher_old)

    def restore(self, state: Weights) -> None:
        """Take the Fisher information over as well."""
        super().restore(state)
        self.fisher_old = untagged("fisher", state, self.context.device)
