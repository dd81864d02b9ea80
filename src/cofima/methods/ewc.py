r"""EWC, Elastic Weight Consolidation.

Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017,
https://arxiv.org/abs/1612.00796. A quadratic penalty keeps weights that are important for old tasks,

.. math:: L = \mathrm{CE}\big(z_{[K_{t-1}:K_t]},\ y\big)
          + \frac{\lambda}{2} \sum_i F_i\, (\theta_i - c_i)^2

*online*: :math:`F \leftarrow \gamma F + F_t` and :math:`c = \theta_{t-1}`. *separate*: one term
:math:`F_k (\theta - \theta_k)^2` for each old task; their sum is, up to a constant, a single term with
:math:`F = \sum_k F_k` and :math:`c = \sum_k F_k \theta_k / F`, so only these two are stored.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from cofima.data.stream import Task
from cofima.methods.base import Method, Share
from cofima.methods.components.cost import FISHER_PASS, Cost, Plan
from cofima.methods.components.fisher import FISHER, FisherOptions, task_fisher
from cofima.methods.state import Entry, tagged, untagged
from cofima.training.context import Batch
from cofima.weights.ops import Weights


@dataclass(eq=False)
class EWC(Method):
    """Penalize changes of weights in proportion to their importance for old tasks.

    Args:
        lamb: Strength of the penalty; 0 is fine-tuning with weight decay of old rows.
        form: A single anchor, the last weights, and a decaying sum of Fisher information (online); or a
            penalty for each old task around its own weights (separate).
        gamma: Decay of the old Fisher information before a task's own is added (online).
        fisher: Options of the Fisher information; by default that of the training loss.
    """

    lamb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1000.0
    form: Literal["online", "separate"] = "online"
    gamma: Share = 1.0
    fisher: FisherOptions = field(default_factory=lambda: FisherOptions(logits="local"))

    label: ClassVar[str] = "EWC"
    paper: ClassVar[str] = "Kirkpatrick et al., PNAS 2017, https://arxiv.org/abs/1612.00796"
    equation: ClassVar[str] = "L = CE(z_new, y) + λ/2 Σ_i F_i (θ_i - θ_{t-1,i})²,  F = γ F + F_t"
    frozen_old_heads: ClassVar[bool] = False
    state_schema: ClassVar[tuple[Entry, ...]] = (FISHER, Entry("center.", axis="weight"))

    def first_task_key(self) -> tuple[Any, ...]:
        """Return the options that affect the stored Fisher information: there is no penalty yet."""
        return ("ewc", self.form, self.fisher.model_dump())

    def cost(self, plan: Plan) -> Cost:
        """Add the Fisher information of each task."""
        return super().cost(plan).plus(steps=FISHER_PASS * plan.train)

    def begin(self, task: Task) -> None:
        """Set up the penalty before the head grows: new rows are not penalized."""
        if task.index == 0:
            self.importance, self.center = Weights(), Weights()
        held = dict(self.net.named_parameters()) if task.index > 0 else {}
        self.held: list[Tensor] = list(held.values())
        self.anchor = [self.center.get(key, value.detach().clone()) for key, value in held.items()]
        self.pull = [self.importance[key].clamp(max=self.firmest(key)) for key in held]
        if firm := sum(int((self.importance[key] > self.firmest(key)).sum()) for key in held):
            self.note(f"lamb is more than SGD can follow at this train.lr: {firm} weight(s) held less firmly")
        super().begin(task)

    def firmest(self, key: str) -> float:
        """Return the largest usable Fisher value: beyond it, one SGD step would overshoot the anchor."""
        how = self.context.train
        rate = how.lr * (how.backbone_lr_scale if key.startswith("backbone.") else 1)
        return 1 / (rate * self.lamb) if rate * self.lamb > 0 else torch.inf

    def loss(self, batch: Batch) -> Tensor:
        """Return the local loss plus the penalty."""
        loss = super().loss(batch)
        if self.task.index == 0:
            return loss
        return loss + self.lamb * quadratic(self.held, self.anchor, self.pull)

    def end(self, task: Task) -> None:
        """Add the task's Fisher information to the sum."""
        del self.held, self.anchor, self.pull
        with self.timed("fisher"):
            fisher = task_fisher(self.net, task, self.context, self.fisher)
        for key, weight in self.net.named_parameters():
            new = fisher[key]
            old = self.importance.get(key, torch.zeros_like(new))
            if self.form == "separate":
                share = torch.where(
                    new > 0, new / (old + new), (old == 0).to(new)
                )  # if both are 0, any center is correct
                now = weight.detach()
                self.center[key] = torch.lerp(self.center.get(key, now), now, share)
            self.importance[key] = new + (self.gamma if self.form == "online" else 1) * old

    def state(self) -> Weights:
        """Return the Fisher information, and the centers of the separate form."""
        return tagged("fisher", self.importance) | tagged("center", self.center)

    def restore(self, state: Weights) -> None:
        """Restore the Fisher information and the centers."""
        self.importance = untagged("fisher", state, self.context.device)
        self.center = untagged("center", state, self.context.device)


def quadratic(weights: list[Tensor], center: list[Tensor], importance: list[Tensor]) -> Tensor:
    r"""Return :math:`\tfrac12 \sum_i F_i (\theta_i - c_i)^2` in a few passes over the weights."""
    value: Tensor = _Quadratic.apply(center, importance, *weights)
    return value


class _Quadratic(torch.autograd.Function):
    """Value and gradient in one pass; autograd would store several copies of the network."""

    @staticmethod
    def forward(ctx: Any, center: list[Tensor], importance: list[Tensor], *weights: Tensor) -> Tensor:
        moved = torch._foreach_sub(weights, center)
        ctx.pull = torch._foreach_mul(moved, importance)
        parts = [torch.dot(m.flatten(), p.flatten()) for m, p in zip(moved, ctx.pull, strict=True)]
        return 0.5 * torch.stack(parts).sum()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *torch._foreach_mul(ctx.pull, gradient[0])
