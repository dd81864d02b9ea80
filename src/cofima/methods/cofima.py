r"""CoFiMA, Continual Fisher-weighted Model Averaging.

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977. CoMA with an average weighted by Fisher information, per parameter,

.. math:: \theta^*_t = \frac{\lambda F_t\, \theta_t + (1-\lambda) F^*_{t-1}\, \theta^*_{t-1}}
                            {\lambda F_t + (1-\lambda) F^*_{t-1}}

:math:`F_t` is the diagonal Fisher information of :math:`\theta_t` on task :math:`t`, and
:math:`F^*_{t-1}` that of :math:`\theta^*_{t-1}` on task :math:`t-1`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from cofima.data.stream import Task
from cofima.methods.base import Share
from cofima.methods.components.aligned import Aligned
from cofima.methods.components.averaging import averaged_in_place, distance_moved
from cofima.methods.components.cost import FISHER_PASS, Cost, Plan
from cofima.methods.components.fisher import (
    FISHER,
    KeptFisherOptions,
    PassingFeatures,
    add_fisher,
    released_fisher,
    task_fisher,
    weighted,
)
from cofima.methods.state import Entry, untagged
from cofima.weights.average import fisher_average
from cofima.weights.equal_step import equal_step
from cofima.weights.ops import Weights, snapshot


@dataclass(eq=False)
class CoFiMA(Aligned):
    """Average the weights before and after each task, weighted by Fisher information.

    Args:
        lam: Share of the new weights where both Fishers are equal; 0 keeps the old weights, 1 is SLCA;
            ``auto`` weights both sides by Fisher information alone, summed over tasks.
        fallback: Not used here; an option of CoMA. With CoFiMA, ``auto`` is always defined.
        weight: Weight of a task in a sum of Fisher information.
        statistics: Gaussians from the merged weights, or from the trained ones (Algorithm 1 as printed).
        fisher: Options of the Fisher information.
        variant: The paper's equations, or the authors' released code.
        fisher_history: The last task's Fisher information (Eq. 7), or the sum over all tasks (with
            lam 0.5 and ``weight=tasks`` this is Eq. 6). ``lam=auto`` always uses the sum, and lam 0.5.
    """

    lam: Share | Literal["auto"] = 0.4
    fallback: Share = 0.4
    weight: Literal["classes", "samples", "tasks"] = "classes"
    statistics: Literal["merged", "trained"] = "merged"
    fisher: KeptFisherOptions = field(default_factory=KeptFisherOptions)
    variant: Literal["paper", "authors"] = "paper"
    fisher_history: Literal["last", "accumulate"] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift == "linear" and self.statistics == "trained":
            raise ValueError("drift=linear: old classes follow the merged weights; take statistics=merged")
        if self.variant == "authors" and self.sums:
            raise ValueError("variant=authors: the released code has neither lam=auto nor a summed Fisher")
        if self.fisher.share == "equal" and self.variant == "authors":
            raise ValueError("fisher.share=equal: not for variant=authors, which no option of fisher acts on")
        if self.fisher.share == "equal" and self.lam == "auto":
            raise ValueError(
                "fisher.share=equal: needs a number for lam, the share of the way; with lam=auto "
                "the sums of Fisher information decide how far to go"
            )

    label: ClassVar[str] = "CoFiMA"
    paper: ClassVar[str] = "Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977, Eq. 7"
    averages_with: ClassVar[str] = "previous"
    equation: ClassVar[str] = "θ*_t = (λ F_t θ_t + (1-λ) F*_{t-1} θ*_{t-1}) / (λ F_t + (1-λ) F*_{t-1})"
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, FISHER)

    @property
    def sums(self) -> bool:
        """True if Fisher information is summed over tasks."""
        return self.fisher_history == "accumulate" or self.lam == "auto"

    def first_task_key(self) -> tuple[Any, ...]:
        """Return the options that affect the stored Fisher information: nothing is averaged yet."""
        exact = self.fisher.kept == "float32"  # as in methods without this option, which share the key
        how = self.fisher.model_dump(exclude={"share", "kept"} if exact else {"share"})
        if self.sums:
            return ("summed fisher", how, self.weight, *self.head_key())
        return ("fisher", how if self.variant == "paper" else None, self.variant, *self.head_key())

    def cost(self, plan: Plan) -> Cost:
        """Add the Fisher information of each task; Eq. 7 also needs that of the merged weights."""
        images = plan.train + (plan.later if self.variant == "paper" and not self.sums else 0)
        return super().cost(plan).plus(steps=FISHER_PASS * images)

    @property
    def uses_fisher(self) -> bool:
        """True: every average is weighted by Fisher information."""
        return True

    # Algorithm 1: begin, train (as every method does), trained_fisher, share, finish.

    def begin(self, task: Task) -> None:
        """Copy θ*_{t-1} before the head grows: rows of new classes are not averaged."""
        self.old = snapshot(self.net)
        super().begin(task)

    def trained_fisher(self, task: Task) -> Weights:
        """Return F_t, the Fisher information of the current weights; in a sum, times the task's weight."""
        with self.timed("fisher"):
            if self.variant == "authors":
                return released_fisher(self.net, task, self.context)
            passing = PassingFeatures()
            fisher = task_fisher(self.net, task, self.context, self.fisher, passing)
            self.passed = passing
            return weighted(fisher, task, self.weight) if self.sums else fisher

    def share(self, task: Task, fisher: Weights) -> float:
        """Return ``lam``; 0.5 for ``auto``, where only the summed Fisher information weights both sides."""
        return 0.5 if self.lam == "auto" else self.lam

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Average (Eq. 7), compute the Fisher information of the average, then store statistics and align."""
        if self.statistics == "trained":
            self.remember(task)
        trained_head = snapshot(self.net.head)
        if task.index > 0:  # θ_0 was trained on none of the tasks: there is no F*_0 to weight it by
            self.merge(task, lam, fisher)  # θ*_t
        del self.old
        if not last:
            self.keep_fisher(task, fisher)  # F*_t
        if self.statistics == "merged":
            self.remember(task)  # μ_c and Σ_c of the task's classes
        self.align_head(task)
        if self.variant == "authors":  # the released code continues with the head before averaging
            self.net.head.load_state_dict(trained_head)

    def merge(self, task: Task, lam: float, fisher: Weights) -> None:
        """Replace θ_t by its Fisher-weighted average with θ*_{t-1}, in place."""
        self.passed = None  # features of the trained weights are stale once these are averaged
        distance = distance_moved(untagged("backbone", self.old), self.net.backbone)
        self.facts |= {"lam": lam, "trained_distance": distance}
        # Weights without F*, such as head rows added by a task without training, get the plain average.
        known = {key: value for key, value in fisher.items() if key in self.old_fisher or key not in self.old}
        with averaged_in_place(self.net, self.old, lam, task, self.context) as new:
            equal = self.fisher.share == "equal" and known.keys() & self.old_fisher.keys()
            scale = self.scale(new, lam, known) if equal else 1.0
            fisher_average(self.old, new, self.old_fisher, known, lam, scale=scale, out=new)
            if self.variant == "authors":  # reproduces the released code, which multiplies new rows by F_t
                for key in new.keys() - self.old.keys():
                    new[key].mul_(fisher[key])

    def scale(self, new: Weights, lam: float, fisher: Weights) -> float:
        """Return the scale of F_t that makes the step as long as CoMA's, and note it in the history."""
        step = equal_step(self.old, new, self.old_fisher, fisher, lam)
        self.facts["notes"].append(f"Fisher information times {step.scale:.3g}: share {step.share:.3f}")
        if not step.reached:
            self.note(
                f"no factor of the Fisher information makes the step {lam:g} of the way; the nearest is taken"
            )
        return step.scale

    def keep_fisher(self, task: Task, fisher: Weights) -> None:
        """Store the Fisher information for the next task: the sum, or that of the merged weights."""
        if self.sums:
            self.old_fisher = add_fisher(self.old_fisher, fisher)
        elif task.index == 0 or self.variant == "authors":
            self.old_fisher = fisher
        else:
            self.old_fisher = {}
            fisher.clear()  # neither is needed again: saves the memory of two models while F*_t is computed
            self.old_fisher = self.trained_fisher(task)  # the network now holds θ*_t
        kept = getattr(torch, self.fisher.kept)  # rounded here, so that a resumed run is bit-identical
        self.old_fisher = {key: value.to(kept) for key, value in self.old_fisher.items()}
