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
from cofima.methods.base import Share
from cofima.methods.components.aligned import SLOW_LEARNER, Aligned
from cofima.methods.components.averaging import averaged_in_place, distance_moved
from cofima.methods.components.cost import FISHER_PASS, Cost, Plan
from cofima.methods.components.fisher import FISHER, FisherOptions, add_fisher, task_fisher, weighted
from cofima.methods.state import Entry, untagged
from cofima.weights import Weights, auto_lambda, average, snapshot


@dataclass(eq=False)
class CoMA(Aligned):
    """Average the weights before and after each task.

    Args:
        lam: Share of the new weights; 0 keeps the old weights, 1 is SLCA; ``auto`` minimizes the sum of
            quadratic losses of old and new tasks between the two (needs Fisher information).
        fallback: Share used if ``auto`` is undefined.
        weight: Weight of a task in the sum of Fisher information for ``auto``.
        statistics: Gaussians from the merged weights, or from the trained ones (Algorithm 1 as printed).
        fisher: Options of the Fisher information.
    """

    lam: Share | Literal["auto"] = 0.4
    fallback: Share = 0.4
    weight: Literal["classes", "samples", "tasks"] = "classes"
    statistics: Literal["merged", "trained"] = "merged"
    fisher: FisherOptions = field(default_factory=FisherOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift == "linear" and self.statistics == "trained":
            raise ValueError("drift=linear: old classes follow the merged weights; take statistics=merged")

    label: ClassVar[str] = "CoMA"
    paper: ClassVar[str] = "Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977, Eq. 3"
    averages_with: ClassVar[str] = "previous"
    equation: ClassVar[str] = "θ*_t = (1 - λ) θ*_{t-1} + λ θ_t"
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, FISHER)

    def first_task_key(self) -> tuple[Any, ...]:
        """Return the options that affect the stored Fisher information, if any: nothing is averaged yet."""
        if self.uses_fisher:
            return ("summed fisher", self.fisher.model_dump(), self.weight, *self.head_key())
        return (SLOW_LEARNER, *self.head_key())

    def cost(self, plan: Plan) -> Cost:
        """Add the Fisher information if it is needed."""
        return super().cost(plan).plus(steps=FISHER_PASS * plan.train if self.uses_fisher else 0)

    def begin(self, task: Task) -> None:
        """Copy the merged weights of the previous task, before the head grows: new rows are not averaged."""
        self.old = snapshot(self.net)
        super().begin(task)

    @property
    def uses_fisher(self) -> bool:
        """True for ``auto``, which needs Fisher information."""
        return self.lam == "auto"

    def trained_fisher(self, task: Task) -> Weights:
        """Return the task's Fisher information times the task's weight if it is needed."""
        if not self.uses_fisher:
            return {}
        with self.timed("fisher"):
            return weighted(task_fisher(self.net, task, self.context, self.fisher), task, self.weight)

    def share(self, task: Task, fisher: Weights) -> float:
        """Return ``lam``; for ``auto``, the minimizer of the two quadratic losses."""
        if self.lam != "auto":
            return self.lam
        if task.index == 0:  # nothing to average with yet
            return 1.0
        return auto_lambda(self.old, self.net.state_dict(), self.old_fisher, fisher, fallback=self.fallback)

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Average, then store statistics and align (or store first, as Algorithm 1 is printed)."""
        if self.statistics == "trained":
            self.remember(task)
        if task.index > 0:
            distance = distance_moved(untagged("backbone", self.old), self.net.backbone)
            self.facts |= {"lam": lam, "trained_distance": distance}
            with averaged_in_place(self.net, self.old, lam, task, self.context) as new:
                average(self.old, new, lam, out=new)
        del self.old
        self.old_fisher = add_fisher(self.old_fisher, fisher)
        if self.statistics == "merged":
            self.remember(task)
        self.align_head(task)
