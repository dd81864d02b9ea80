r"""Weight ensemble: uniform average of the weights of all tasks.

A baseline of Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977. Each task is fine-tuned to :math:`\theta_t` from the pre-trained
weights :math:`\theta_0`, or from the mean so far, and the network becomes the mean of all,

.. math:: \theta^*_t = \frac1t \sum_{k=1}^{t} \theta_k
                     = \left(1 - \tfrac1t\right) \theta^*_{t-1} + \tfrac1t\, \theta_t

The head is not averaged. Slow learner and classifier alignment as in SLCA.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cofima.data.stream import Task
from cofima.methods.components.aligned import SLOW_LEARNER, Aligned
from cofima.methods.components.averaging import START, averaged_in_place, distance_moved
from cofima.methods.state import Entry
from cofima.weights import Weights, average, snapshot


@dataclass(eq=False)
class WeightEnsemble(Aligned):
    """Average the weights of all tasks uniformly.

    Args:
        init: Initial weights of each task: those before the first task (pretrained), or the mean so far
            (previous), which is CoMA with lam = 1/t.
    """

    init: Literal["pretrained", "previous"] = "pretrained"

    label: ClassVar[str] = "Weight ensemble"
    paper: ClassVar[str] = "a baseline of Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977, Table 3"
    can_refine: ClassVar[bool] = False
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, START)
    averages_with: ClassVar[str] = "previous"
    equation: ClassVar[str] = (
        "θ*_t = (1 - 1/t) θ*_{t-1} + 1/t θ_t, each θ_t trained from θ_0 or from θ*_{t-1}"
    )

    def first_task_key(self) -> tuple[Any, ...]:
        """Return a key that depends on whether the initial weights are stored: nothing is averaged yet."""
        return ("weight_ensemble" if self.init == "pretrained" else SLOW_LEARNER, *self.head_key())

    def begin(self, task: Task) -> None:
        """Copy the mean so far, and load the pre-trained weights if tasks start from them."""
        super().begin(task)
        self.mean = snapshot(self.net.backbone)
        if self.init == "pretrained":
            if task.index == 0:
                self.start = snapshot(self.net.backbone)
            self.net.backbone.load_state_dict(self.start)

    def share(self, task: Task, fisher: Weights) -> float:
        """Return 1/t: all tasks have the same weight."""
        return 1 / (task.index + 1)

    @property
    def restarts(self) -> bool:
        """True if tasks start from the pre-trained weights."""
        return self.init == "pretrained"

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Add the new weights to the mean, then store statistics and align."""
        backbone = self.net.backbone
        if task.index > 0:
            distance = distance_moved(self.mean, backbone)
            self.facts |= {"lam": lam, "trained_distance": distance}
            with averaged_in_place(backbone, self.mean, lam, task, self.context, moved=distance > 0) as new:
                average(self.mean, new, lam, out=new)
        del self.mean
        self.fit_head(task)
