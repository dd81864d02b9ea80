r"""EMA: exponential moving average of the weights over training steps.

A baseline of Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977. A shadow copy of the network starts each task at :math:`\theta^*_{t-1}`,
is updated with the weights :math:`\theta_m` after every step, and becomes the result of the task,

.. math:: \bar\theta_m = \beta\, \bar\theta_{m-1} + (1 - \beta)\, \theta_m,
          \qquad \theta^*_t = \bar\theta_M

As printed in the paper, :math:`\beta` multiplies the new weights instead.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cofima.data.stream import Task
from cofima.methods.base import Share
from cofima.methods.components.aligned import Aligned
from cofima.methods.components.averaging import averaged_in_place, distance_moved
from cofima.training.context import Batch
from cofima.weights import Weights, snapshot


@dataclass(eq=False)
class EMA(Aligned):
    """Average the weights over the steps of a task, and continue from the average.

    Args:
        decay: Share of the previous average in each step; 0 is SLCA. With ``form=as_printed``, share of the
            new weights.
        form: The usual moving average (standard), or the formula as printed in the paper (as_printed),
            which applies ``decay`` to the new weights and so hardly averages.
    """

    decay: Share = 0.999
    form: Literal["standard", "as_printed"] = "standard"

    label: ClassVar[str] = "EMA"
    paper: ClassVar[str] = "a baseline of Marouf et al., ECCV 2024, https://arxiv.org/abs/2312.08977, Table 3"
    can_refine: ClassVar[bool] = False
    equation: ClassVar[str] = "ema_m = β ema_{m-1} + (1 - β) θ_m at every step, from θ*_{t-1};  θ*_t = ema_M"

    def first_task_key(self) -> tuple[Any, ...]:
        """Return a key with the share of the new weights in each step: the first task is averaged, too."""
        return ("ema", self.step_share, *self.head_key())

    @property
    def step_share(self) -> float:
        """Share of the new weights in each step."""
        return 1 - self.decay if self.form == "standard" else self.decay

    def init_head(self, task: Task) -> None:
        """Initialize the shadow with the weights before training, once the head has its initial rows."""
        super().init_head(task)
        self.old = snapshot(self.net.backbone)
        now = {key: value for key, value in self.net.state_dict().items() if value.is_floating_point()}
        self.followed = list(now.values())  # the network's own tensors, which every step updates in place
        self.shadow = [value.clone() for value in self.followed]

    def after_step(self, batch: Batch) -> None:
        """Update the shadow with the weights."""
        super().after_step(batch)
        for shadow, value in zip(self.shadow, self.followed, strict=True):
            shadow.lerp_(value, self.step_share)

    def task_state(self) -> Weights:
        """Return the state of the base class and the shadow."""
        return super().task_state() | {f"shadow.{n}": value for n, value in enumerate(self.shadow)}

    def restore_task_state(self, state: Weights) -> None:
        """Restore the state of the base class and the shadow."""
        super().restore_task_state(state)
        for n, shadow in enumerate(self.shadow):
            shadow.copy_(state[f"shadow.{n}"])

    def end(self, task: Task) -> None:
        """Replace the weights with the shadow, then store statistics and align."""
        backbone = self.net.backbone
        distance = self.facts["trained_distance"] = distance_moved(self.old, backbone)
        with averaged_in_place(backbone, self.old, self.step_share, task, self.context, moved=distance > 0):
            for shadow, value in zip(self.shadow, self.followed, strict=True):
                value.copy_(shadow)
            del self.old, self.shadow, self.followed
        self.fit_head(task)
