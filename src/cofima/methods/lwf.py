r"""LwF, Learning without Forgetting.

Li and Hoiem, "Learning without Forgetting", ECCV 2016, https://arxiv.org/abs/1606.09282. On the new
images, the old classes' logits stay close to those of the network before the task,

.. math:: L = \mathrm{CE}\big(z_{[K_{t-1}:K_t]},\ y\big) - \lambda \,\frac1N \sum_i \sum_{k \le K_{t-1}}
          \mathrm{softmax}(\hat z_i / T)_k \log \mathrm{softmax}(z_i / T)_k

with :math:`\hat z` the logits of :math:`\theta_{t-1}` for the same augmented images.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.distillation import distillation, teacher_of
from cofima.training.context import Batch


@dataclass(eq=False)
class LwF(Method):
    """Learn the new task while distilling the old network's predictions for old classes.

    Args:
        lamb: Weight of the distillation; 0 is fine-tuning with weight decay of old rows.
        temperature: Softmax temperature of both predictions in the distillation.
    """

    lamb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3.0
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0

    label: ClassVar[str] = "LwF"
    paper: ClassVar[str] = "Li and Hoiem, ECCV 2016, https://arxiv.org/abs/1606.09282"
    equation: ClassVar[str] = "L = CE(z_new, y) + λ KD_T(z_old, ẑ_old), ẑ from θ_{t-1}"
    frozen_old_heads: ClassVar[bool] = False

    def first_task_key(self) -> tuple[Any, ...]:
        """Return a key without options: nothing is distilled yet."""
        return ("lwf",)

    def cost(self, plan: Plan) -> Cost:
        """Add the forward passes of the teacher."""
        return super().cost(plan).plus(forward=plan.epochs * plan.later)

    def begin(self, task: Task) -> None:
        """Copy the network of the previous task as the teacher, then grow the head."""
        if task.index > 0:
            self.teacher = teacher_of(self.net)
        super().begin(task)

    def loss(self, batch: Batch) -> Tensor:
        """Return the local loss plus distillation of the old classes."""
        logits = self.net(batch.images)
        loss = self.local_loss(logits, batch.labels)
        if self.task.index == 0:
            return loss
        old = self.teacher(batch.images)
        return loss + self.lamb * distillation(logits[:, : old.shape[1]], old, self.temperature)

    def end(self, task: Task) -> None:
        """Free the teacher: the next one is a copy of the current network."""
        if task.index > 0:
            del self.teacher
