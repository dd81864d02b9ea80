r"""CoFiMA, Continual Fisher-weighted Model Averaging.

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977. CoMA with each weight averaged by its Fisher information,

.. math:: \theta^*_t = \frac{\lambda F_t\, \theta_t + (1-\lambda) F^*_{t-1}\, \theta^*_{t-1}}
                            {\lambda F_t + (1-\lambda) F^*_{t-1}}

:math:`F_t` is the diagonal Fisher information of :math:`\theta_t` on task :math:`t`, and
:math:`F^*_{t-1}` that of :math:`\theta^*_{t-1}` on task :math:`t-1`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cofima.data.stream import Task
from cofima.methods.coma import CoMA
from cofima.methods.cost import FISHER_PASS, Cost, Plan
from cofima.methods.slca import SLCA
from cofima.parts.importance import released_fisher, task_fisher
from cofima.weights.average import fisher_average
from cofima.weights.pieces import Weights, snapshot


@dataclass(eq=False)
class CoFiMA(CoMA):
    """Average the weights before and after each task by how much each matters.

    Args:
        variant: The paper's equations, or what the authors' released code does.
        fisher_history: The last task's Fisher information (Eq. 7), or the sum over all tasks (with
            lam 0.5 and ``weight=tasks`` this is Eq. 6). ``lam=auto`` always takes the sum, and lam 0.5.
    """

    variant: Literal["paper", "authors"] = "paper"
    fisher_history: Literal["last", "accumulate"] = "last"

    def __post_init__(self) -> None:
        if self.variant == "authors" and (self.lam == "auto" or self.fisher_history == "accumulate"):
            raise ValueError("variant=authors: the released code has neither lam=auto nor a summed Fisher")

    label: ClassVar[str] = "CoFiMA"
    paper: ClassVar[str] = "Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977, Eq. 7"
    equation: ClassVar[str] = "θ*_t = (λ F_t θ_t + (1-λ) F*_{t-1} θ*_{t-1}) / (λ F_t + (1-λ) F*_{t-1})"

    def first_task_key(self) -> tuple[Any, ...]:
        """Depend on the Fisher information kept: nothing is averaged yet."""
        how = self.fisher.model_dump()
        if self.sums:
            return ("summed fisher", how, self.weight, self.align.shrink)
        return ("fisher", how if self.variant == "paper" else None, self.variant, self.align.shrink)

    def cost(self, plan: Plan) -> Cost:
        """Count the Fisher information of each task; Eq. 7 also measures that of merged weights."""
        images = plan.train + (plan.later if self.variant == "paper" and not self.sums else 0)
        return SLCA.cost(self, plan).plus(steps=FISHER_PASS * images)

    @property
    def sums(self) -> bool:
        """True if Fisher information is summed over tasks."""
        return self.fisher_history == "accumulate" or self.lam == "auto"

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Merge, remember and align; the released code then goes on from the unmerged head."""
        raw_head = snapshot(self.net.head) if self.variant == "authors" else {}
        super().finish(task, lam, fisher, last=last)
        if raw_head:
            self.net.head.load_state_dict(raw_head)

    def share(self, task: Task, fisher: Weights) -> float:
        """Return ``lam``; sums of Fisher information (``auto``) say by themselves what each side counts."""
        return 0.5 if self.lam == "auto" else self.lam

    def merge(self, lam: float, fisher: Weights) -> None:
        """Replace the weights by their Fisher-weighted average with those before the task."""
        new = self.net.state_dict()
        fisher_average(self.old, new, self.fisher_old, fisher, lam, out=new)  # in place
        if self.variant == "authors":  # the released code multiplies new rows by their Fisher
            for key in new.keys() - self.old.keys():
                new[key].mul_(fisher[key])

    @property
    def by_fisher(self) -> bool:
        """Every average is weighted by Fisher information."""
        return True

    def trained_fisher(self, task: Task) -> Weights:
        """Return the Fisher information of the present weights; in a sum, times what the task counts."""
        if self.sums:
            return super().trained_fisher(task)
        with self.timed("fisher"):
            if self.variant == "authors":
                return released_fisher(self.net, task, self.context)
            return task_fisher(self.net, task, self.context, self.fisher)

    def keep_fisher(self, task: Task, fisher: Weights) -> None:
        """Keep the sum, or the Fisher information of the weights that the next task starts from."""
        if self.sums:
            super().keep_fisher(task, fisher)
        elif task.index == 0 or self.variant == "authors":
            self.fisher_old = fisher
        else:
            self.fisher_old = {}
            fisher.clear()  # both have served: two models less while the next is measured
            self.fisher_old = self.trained_fisher(task)  # of the merged weights: F*_t
