r"""OPCM: merge task vectors sequentially, projected off the main directions of earlier ones.

Tang et al., "Merging Models on the Fly Without Retraining: A Sequential Approach to Scalable Continual Model
Merging", 2025, https://arxiv.org/abs/2501.09522. Every task is fine-tuned from the pre-trained weights,
:math:`\tau_t = \theta_t - \theta_0`. Let :math:`\tau^*_{t-1} = U S V^\top` be a layer's matrix of the merged
vector so far, whose first r singular values sum to at most the share :math:`\alpha` of all. Then

.. math:: P(\tau_t) = \tau_t - U_r U_r^\top \tau_t V_r V_r^\top
                      - \sum_{i > r} u_i\, (u_i^\top \tau_t v_i)\, v_i^\top, \qquad
          \tau^*_t = \frac{1}{\lambda_t} \left( \lambda_{t-1} \tau^*_{t-1} + P(\tau_t) \right), \qquad
          \theta^*_t = \theta_0 + \tau^*_t

with :math:`\tau^*_1 = \tau_1`, :math:`\lambda_1 = 1`, and :math:`\lambda_t` such that the norm of the merged
vector is the mean norm of the task vectors so far. For weights that are not matrices, P is the identity.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cofima.data.stream import Task
from cofima.methods.base import Share
from cofima.methods.components.aligned import Aligned
from cofima.methods.components.averaging import START, distance_moved
from cofima.methods.components.batchnorm import refresh_batchnorm, statistics_moved
from cofima.methods.state import Entry, tagged, untagged
from cofima.training.loop import plain_batches
from cofima.training.lora import dense_weights
from cofima.weights import Weights, snapshot
from cofima.weights.task_vectors import outside

# Not kept when models are merged: the merged weights are no longer those that the vector gives.
VECTOR, LENGTHS = Entry("vector."), Entry("lengths.")


@dataclass(eq=False)
class OPCM(Aligned):
    """Fine-tune each task from the pre-trained weights, and merge its part orthogonal to earlier tasks.

    Args:
        alpha: Share of a layer's singular values whose directions are protected from later tasks.
    """

    alpha: Share = 0.5

    label: ClassVar[str] = "OPCM"
    paper: ClassVar[str] = "Tang et al., 2025, https://arxiv.org/abs/2501.09522"
    equation: ClassVar[str] = (
        "θ*_t = θ_0 + (λ_{t-1} τ*_{t-1} + P τ_t) / λ_t,  P: off the main directions of τ*_{t-1}"
    )
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, START, VECTOR, LENGTHS)

    @property
    def restarts(self) -> bool:
        """True: every task is trained from the pre-trained weights."""
        return True

    def first_task_key(self) -> tuple[Any, ...]:
        """Return the options that affect the class statistics: nothing is merged yet."""
        return ("opcm", *self.head_key())

    def begin(self, task: Task) -> None:
        """Start from the pre-trained weights, not from the merged ones."""
        super().begin(task)
        if task.index == 0:
            self.start = snapshot(self.net.backbone)
            self.vector = Weights()
            self.scale = torch.ones((), dtype=torch.float64)  # λ
            self.lengths = torch.zeros(2, dtype=torch.float64)  # sum of all |τ_t|, and their number
        self.net.backbone.load_state_dict(self.start)

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Replace the trained weights with the merged ones, then store statistics and align."""
        backbone = self.net.backbone
        trained = snapshot(backbone)
        self.facts["trained_distance"] = distance_moved(self.start, backbone)
        self.merge()
        self.facts["lam"] = 1 / float(self.scale)
        if task.index > 0 and statistics_moved(self.start, trained):
            refresh_batchnorm(backbone, plain_batches(task.train, self.context, "batch norm"))
        self.fit_head(task)

    @torch.no_grad()
    def merge(self) -> None:
        """Merge τ_t into τ*, and load θ_0 + τ* into the backbone."""
        weights = dict(self.net.backbone.named_parameters())
        vectors = {key: (value - self.start[key]).double() for key, value in weights.items()}
        self.lengths = self.lengths + torch.stack([_length(vectors), torch.ones_like(self.scale)])
        if self.vector:
            matrices = dense_weights(self.net.backbone)
            for key, new in vectors.items():
                old = self.vector[key].double()
                if key in matrices:
                    new = outside(old.flatten(1), new.flatten(1), self.alpha).view_as(old)
                vectors[key] = self.scale * old + new
            length, mean = _length(vectors), self.lengths[0] / self.lengths[1]
            self.scale = length / mean if length > 0 else torch.ones_like(length)
            for key, vector in vectors.items():
                weights[key].copy_(self.start[key] + vector / self.scale)
        self.vector = {key: (vector / self.scale).to(weights[key]) for key, vector in vectors.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the state of the base class, τ*, λ and the sum of the norms of task vectors."""
        lengths = {"sum": self.lengths, "scale": self.scale}
        return super().state() | tagged("vector", self.vector) | tagged("lengths", lengths)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state`."""
        super().restore(state)
        self.vector = untagged("vector", state, self.context.device)
        kept = untagged("lengths", state)
        self.lengths, self.scale = kept["sum"], kept["scale"]


def _length(vectors: Weights) -> Tensor:
    return torch.stack([vector.square().sum().cpu() for vector in vectors.values()]).sum().sqrt()
