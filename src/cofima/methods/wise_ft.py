r"""Continual WiSE-FT: average with the pre-trained weights after each task.

Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022, https://arxiv.org/abs/2109.01903,
in the continual form of Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977. After each task,
fine-tuned from :math:`\theta^*_{t-1}` to :math:`\theta_t`,

.. math:: \theta^*_t = (1 - \lambda)\, \theta_0 + \lambda\, \theta_t

The pre-trained network has no head, so the head is not averaged. Slow learner and alignment as in SLCA.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cofima.data.stream import Task
from cofima.methods.base import Share
from cofima.methods.components.aligned import Aligned
from cofima.methods.components.averaging import START, averaged_in_place, distance_moved
from cofima.methods.state import Entry
from cofima.weights import Weights, average, snapshot


@dataclass(eq=False)
class WiSEFT(Aligned):
    """Average the weights after each task with the pre-trained ones.

    Args:
        lam: Share of the new weights; 0 keeps the pre-trained backbone, 1 is SLCA.
        merge_first: Merge after the first task, too, as in the formula; if false, from the second task on.
    """

    lam: Share = 0.5
    merge_first: bool = True

    label: ClassVar[str] = "WiSE-FT"
    paper: ClassVar[str] = (
        "Wortsman et al., CVPR 2022, https://arxiv.org/abs/2109.01903; "
        "over tasks: Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977"
    )
    equation: ClassVar[str] = "θ*_t = (1 - λ) θ_0 + λ θ_t"
    averages_with: ClassVar[str] = "pretrained"
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, START)

    def first_task_key(self) -> tuple[Any, ...]:
        """Return a key with ``lam`` if the first task is merged, too."""
        return ("wise_ft", self.lam if self.merge_first else None, *self.head_key())

    def begin(self, task: Task) -> None:
        """Copy the weights that the task starts from; those of the first task are the pre-trained ones."""
        super().begin(task)
        self.old = snapshot(self.net.backbone)
        if task.index == 0:
            self.start = self.old

    def share(self, task: Task, fisher: Weights) -> float:
        """Return ``lam``."""
        return self.lam

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Average with the pre-trained weights, then store statistics and align."""
        backbone = self.net.backbone
        if task.index > 0 or self.merge_first:
            self.facts |= {"lam": lam, "trained_distance": distance_moved(self.old, backbone)}
            moved = distance_moved(self.start, backbone) > 0
            with averaged_in_place(backbone, self.start, lam, task, self.context, moved=moved) as new:
                average(self.start, new, lam, out=new)
        del self.old
        self.fit_head(task)
