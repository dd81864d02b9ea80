r"""P&M, Perturb-and-Merge: train with perturbations along the merge direction, then merge optimally.

Qiu et al., "Train with Perturbation, Infer after Merging: A Two-Stage Framework for Continual Learning",
NeurIPS 2025, https://arxiv.org/abs/2505.22389. A task is fine-tuned from the merged weights
:math:`\theta^*_{t-1}` to :math:`\theta_t`. With :math:`\Delta = \theta - \theta^*_{t-1}`, each training step
uses the loss at one of

.. math:: \theta, \qquad \theta + \epsilon \Delta, \qquad \theta - \epsilon \Delta

at random, so that the loss stays low between the two. The merged weights minimize, on the segment between
them, the sum of the quadratic losses of all tasks so far, each around its own :math:`\theta_i`:

.. math:: \theta^*_t = \theta^*_{t-1} + \alpha \Delta, \qquad
          \alpha = - \frac{\sum_{i \le t} (\theta^*_{t-1} - \theta_i)^\top F_i \Delta}
                          {\sum_{i \le t} \Delta^\top F_i \Delta}

with diagonal Fisher information :math:`F_i`. The sums over earlier tasks need two numbers per weight for any
number of tasks: :math:`\sum_i F_i`, and the mean of :math:`\theta_i` weighted by :math:`F_i`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from cofima.core.distributed import LossModule
from cofima.data.stream import Task
from cofima.methods.base import Share
from cofima.methods.components.aligned import Aligned
from cofima.methods.components.averaging import averaged_in_place, distance_moved
from cofima.methods.components.cost import FISHER_PASS, Cost, Plan
from cofima.methods.components.fisher import FISHER, FisherOptions, task_fisher
from cofima.methods.state import Entry, tagged, untagged
from cofima.training.context import Batch
from cofima.weights import Weights, average, snapshot
from cofima.weights.distance import least_loss


@dataclass(eq=False)
class PM(Aligned):
    """Perturb the weights along the merge direction in training, then merge at the share of lowest loss.

    Args:
        epsilon: Length of a perturbation, relative to the distance from the weights before the task.
        perturbed: Share of the steps with a perturbation, half of them forward and half backward.
        fisher: Options of the Fisher information.
    """

    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.5
    perturbed: Share = 2 / 3
    fisher: FisherOptions = field(default_factory=FisherOptions)

    label: ClassVar[str] = "P&M"
    paper: ClassVar[str] = "Qiu et al., NeurIPS 2025, https://arxiv.org/abs/2505.22389"
    averages_with: ClassVar[str] = "previous"
    equation: ClassVar[str] = (
        "θ*_t = θ*_{t-1} + α Δ,  α = -Σ_i (θ*_{t-1} - θ_i)ᵀ F_i Δ / Σ_i Δᵀ F_i Δ;  CE at θ, θ ± ε Δ"
    )
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, FISHER, Entry("center."))

    def first_task_key(self) -> tuple[Any, ...]:
        """Return the options of the perturbations and of the Fisher information: nothing is merged yet."""
        return ("pm", self.epsilon, self.perturbed, self.fisher.model_dump(), *self.head_key())

    def cost(self, plan: Plan) -> Cost:
        """Add the Fisher information of each task."""
        return super().cost(plan).plus(steps=FISHER_PASS * plan.train)

    def begin(self, task: Task) -> None:
        """Copy the merged weights of the previous task, the reference of perturbations."""
        super().begin(task)
        if task.index == 0:
            self.center = Weights()
        self.old = snapshot(self.net.backbone)
        self.chance = self.context.seeds.generator("perturbation", task.index)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss at the weights, or at weights perturbed away from or toward the old ones."""
        drawn = float(torch.rand((), generator=self.chance, dtype=torch.float64))
        if drawn >= self.perturbed or self.epsilon == 0:
            return super().loss(batch)
        step = self.epsilon if drawn < self.perturbed / 2 else -self.epsilon
        moved = {
            f"net.backbone.{key}": weight + step * (weight - self.old[key])
            for key, weight in self.net.backbone.named_parameters()
        }
        # the whole loss runs with the perturbed weights, as it may use more of the network than forward()
        value: Tensor = functional_call(LossModule(self.net, super().loss), moved, (batch,))
        return value

    def trained_fisher(self, task: Task) -> Weights:
        """Return the Fisher information of the trained backbone."""
        with self.timed("fisher"):
            fisher = task_fisher(self.net, task, self.context, self.fisher)
        return untagged("backbone", fisher)

    def share(self, task: Task, fisher: Weights) -> float:
        """Return α."""
        now = self.net.backbone.state_dict()
        return least_loss(self.old, now, self.center, self.old_fisher, fisher)

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Add the task's quadratic loss to the sum, merge, then store statistics and align."""
        backbone = self.net.backbone
        self.add_task(fisher)
        if task.index > 0:
            self.facts |= {"lam": lam, "trained_distance": distance_moved(self.old, backbone)}
            with averaged_in_place(backbone, self.old, lam, task, self.context) as new:
                average(self.old, new, lam, out=new)
        del self.old
        self.fit_head(task)

    @torch.no_grad()
    def add_task(self, fisher: Weights) -> None:
        """Add F_t to the sum and θ_t to the mean: a sum of quadratics is one around the weighted mean."""
        for key, weight in self.net.backbone.named_parameters():
            new, now = fisher[key], weight.detach()
            old = self.old_fisher.get(key, torch.zeros_like(new))
            share = torch.where(new > 0, new / (old + new), (old == 0).to(new))
            self.center[key] = torch.lerp(self.center.get(key, now), now, share)
            self.old_fisher[key] = old + new

    def state(self) -> dict[str, Tensor]:
        """Return the state of the base class and the center of the quadratic losses."""
        return super().state() | tagged("center", self.center)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the state of the base class and the center."""
        super().restore(state)
        self.center = untagged("center", state, self.context.device)
