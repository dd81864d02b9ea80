r"""CoFiMA, Continual Fisher-weighted Model Averaging.

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977. CoMA with each weight averaged by its Fisher information,

.. math:: \theta^*_t = \frac{\lambda F_t\, \theta_t + (1-\lambda) F^*_{t-1}\, \theta^*_{t-1}}
                            {\lambda F_t + (1-\lambda) F^*_{t-1}}

:math:`F_t` is the diagonal Fisher information of :math:`\theta_t` on task :math:`t`, and
:math:`F^*_{t-1}` that of :math:`\theta^*_{t-1}` on task :math:`t-1`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cofima.data.stream import Task
from cofima.methods.averaging import Averaging
from cofima.methods.base import Share
from cofima.methods.components.aligned import Aligned
from cofima.methods.components.averaging import averaged_in_place, distance_moved
from cofima.methods.components.fisher_options import (
    FISHER,
    FisherOptions,
    add_fisher,
    released_fisher,
    task_fisher,
    weighted,
)
from cofima.methods.cost import FISHER_PASS, Cost, Plan
from cofima.methods.state import Entry, tagged, untagged
from cofima.weights.average import fisher_average
from cofima.weights.ops import Weights, snapshot


@dataclass(eq=False)
class CoFiMA(Averaging, Aligned):
    """Average the weights before and after each task by how much each matters.

    Args:
        lam: Share of the new weights where both sides matter the same; 0 keeps the old ones, 1 is SLCA;
            ``auto`` leaves all to the Fisher information, summed over tasks.
        fallback: As CoMA has it; here ``auto`` is always defined.
        weight: What a task counts by where Fisher information is summed.
        statistics: Gaussians from the merged weights, or from the trained ones (Algorithm 1 as printed).
        fisher: How Fisher information is estimated.
        variant: The paper's equations, or what the authors' released code does.
        fisher_history: The last task's Fisher information (Eq. 7), or the sum over all tasks (with
            lam 0.5 and ``weight=tasks`` this is Eq. 6). ``lam=auto`` always takes the sum, and lam 0.5.
    """

    lam: Share | Literal["auto"] = 0.4
    fallback: Share = 0.4
    weight: Literal["classes", "samples", "tasks"] = "classes"
    statistics: Literal["merged", "trained"] = "merged"
    fisher: FisherOptions = field(default_factory=FisherOptions)
    variant: Literal["paper", "authors"] = "paper"
    fisher_history: Literal["last", "accumulate"] = "last"

    def __post_init__(self) -> None:
        if self.variant == "authors" and self.sums:
            raise ValueError("variant=authors: the released code has neither lam=auto nor a summed Fisher")

    label: ClassVar[str] = "CoFiMA"
    paper: ClassVar[str] = "Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977, Eq. 7"
    equation: ClassVar[str] = "θ*_t = (λ F_t θ_t + (1-λ) F*_{t-1} θ*_{t-1}) / (λ F_t + (1-λ) F*_{t-1})"
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, FISHER)

    @property
    def sums(self) -> bool:
        """Whether Fisher information is summed over tasks."""
        return self.fisher_history == "accumulate" or self.lam == "auto"

    def first_task_key(self) -> tuple[Any, ...]:
        """Depend on the Fisher information kept: nothing is averaged yet."""
        how = self.fisher.model_dump()
        if self.sums:
            return ("summed fisher", how, self.weight, self.align.shrink)
        return ("fisher", how if self.variant == "paper" else None, self.variant, self.align.shrink)

    def cost(self, plan: Plan) -> Cost:
        """Count the Fisher information of each task; Eq. 7 also measures that of merged weights."""
        images = plan.train + (plan.later if self.variant == "paper" and not self.sums else 0)
        return super().cost(plan).plus(steps=FISHER_PASS * images)

    def begin(self, task: Task) -> None:
        """Keep the weights before the task; rows of new classes are not in them."""
        self.old = snapshot(self.net)
        if task.index == 0:
            self.fisher_old: Weights = {}
        super().begin(task)

    @property
    def by_fisher(self) -> bool:
        """Every average is weighted by Fisher information."""
        return True

    @property
    def old_fisher(self) -> Weights:
        """Return the Fisher information kept from the tasks before."""
        return self.fisher_old

    def trained_fisher(self, task: Task) -> Weights:
        """Return the Fisher information of the present weights; in a sum, times what the task counts."""
        with self.timed("fisher"):
            if self.variant == "authors":
                return released_fisher(self.net, task, self.context)
            fisher = task_fisher(self.net, task, self.context, self.fisher)
            return weighted(fisher, task, self.weight) if self.sums else fisher

    def share(self, task: Task, fisher: Weights) -> float:
        """Return ``lam``; sums of Fisher information (``auto``) say by themselves what each side counts."""
        return 0.5 if self.lam == "auto" else self.lam

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Average by Fisher information, measure that of the average, then remember and align."""
        if self.statistics == "trained":
            self.remember(task)
        trained_head = snapshot(self.net.head)
        if task.index > 0:
            self.merge(task, lam, fisher)
        del self.old
        if not last:
            self.keep_fisher(task, fisher)
        if self.statistics == "merged":
            self.remember(task)
        self.align_head(task)
        if self.variant == "authors":  # the released code goes on from the head before the average
            self.net.head.load_state_dict(trained_head)

    def merge(self, task: Task, lam: float, fisher: Weights) -> None:
        """Replace the weights by their Fisher-weighted average with those before the task."""
        distance = distance_moved(untagged("backbone", self.old), self.net.backbone)
        self.facts |= {"lam": lam, "trained_distance": distance}
        with averaged_in_place(self.net, self.old, lam, task, self.context) as new:
            fisher_average(self.old, new, self.fisher_old, fisher, lam, out=new)
            if self.variant == "authors":  # the released code multiplies new rows by their Fisher
                for key in new.keys() - self.old.keys():
                    new[key].mul_(fisher[key])

    def keep_fisher(self, task: Task, fisher: Weights) -> None:
        """Keep the sum, or the Fisher information of the weights that the next task starts from."""
        if self.sums:
            self.fisher_old = add_fisher(self.fisher_old, fisher)
        elif task.index == 0 or self.variant == "authors":
            self.fisher_old = fisher
        else:
            self.fisher_old = {}
            fisher.clear()  # both have served: two models less while the next is measured
            self.fisher_old = self.trained_fisher(task)  # of the merged weights: F*_t

    def state(self) -> Weights:
        """Keep the Fisher information too."""
        return super().state() | tagged("fisher", self.fisher_old)

    def restore(self, state: Weights) -> None:
        """Take the Fisher information over as well."""
        super().restore(state)
        self.fisher_old = untagged("fisher", state, self.context.device)
