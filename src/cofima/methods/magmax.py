r"""MagMax: merge task vectors by the largest magnitude per weight.

Marczak et al., "MagMax: Leveraging Model Merging for Seamless Continual Learning", ECCV 2024,
https://arxiv.org/abs/2407.06322. Tasks are fine-tuned sequentially, :math:`\theta_t` from
:math:`\theta_{t-1}`; predictions use merged weights, computed from the pre-trained ones and the task vectors,

.. math:: \tau_t = \theta_t - \theta_0, \qquad
          \tau^{max}_t = \tau_k \text{ with } k = \arg\max_{k \le t} |\tau_k| \text{ element by element},
          \qquad \theta^*_t = \theta_0 + \lambda\, \tau^{max}_t

The maximum is updated after each task, so only one vector is stored for any number of tasks. The paper's
classifier is CLIP's text encoder; here it is a head, with slow learner and alignment as in SLCA.
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
from cofima.weights import Weights, average, snapshot
from cofima.weights.task_vectors import larger

# Not kept when models are merged: the merged weights are no longer those that the vector gives.
TRAINED, VECTOR = Entry("trained."), Entry("vector.")


@dataclass(eq=False)
class MagMax(Aligned):
    """Fine-tune sequentially, and predict with the largest change of each weight.

    Args:
        lam: Scale of the merged task vector; 0 keeps the pre-trained backbone.
    """

    lam: Share = 0.5

    label: ClassVar[str] = "MagMax"
    paper: ClassVar[str] = "Marczak et al., ECCV 2024, https://arxiv.org/abs/2407.06322"
    equation: ClassVar[str] = "θ*_t = θ_0 + λ τ_max, the largest of τ_k = θ_k - θ_0, k ≤ t;  θ_t from θ_{t-1}"
    state_schema: ClassVar[tuple[Entry, ...]] = (*Aligned.state_schema, START, TRAINED, VECTOR)

    def first_task_key(self) -> tuple[Any, ...]:
        """Return a key with ``lam``: the first task is merged, too."""
        return ("magmax", self.lam, *self.head_key())

    def begin(self, task: Task) -> None:
        """Continue from the trained weights θ_{t-1}, not from the merged ones."""
        super().begin(task)
        if task.index == 0:
            self.start = self.trained = snapshot(self.net.backbone)
            self.vector = Weights()
        self.net.backbone.load_state_dict(self.trained)

    def initial_features(self, task: Task) -> Tensor:
        """Return features of the weights that training continues with, not of the merged ones."""
        return self.features(task.train)

    def share(self, task: Task, fisher: Weights) -> float:
        """Return ``lam``."""
        return self.lam

    def finish(self, task: Task, lam: float, fisher: Weights, *, last: bool = False) -> None:
        """Store θ_t for the next task, load the merged weights, then store statistics and align."""
        backbone = self.net.backbone
        self.facts |= {"lam": lam, "trained_distance": distance_moved(self.trained, backbone)}
        self.trained = snapshot(backbone)
        self.merge(lam)
        # θ_0 and θ_1 have their own batch statistics; all other merged weights need a new estimate
        own = lam == 0 or (lam == 1 and task.index == 0)
        if not own and statistics_moved(self.start, self.trained):
            refresh_batchnorm(backbone, plain_batches(task.train, self.context, "batch norm"))
        self.fit_head(task)

    @torch.no_grad()
    def merge(self, lam: float) -> None:
        """Update τ_max with θ_t, and load θ_0 + λ τ_max into the backbone."""
        weights = self.net.backbone.state_dict()
        average(self.start, weights, lam, out=weights)  # for buffers, which have no task vector
        for key, _ in self.net.backbone.named_parameters():
            vector = self.trained[key] - self.start[key]
            self.vector[key] = larger(self.vector[key], vector) if key in self.vector else vector
            torch.add(self.start[key], self.vector[key], alpha=lam, out=weights[key])

    def state(self) -> dict[str, Tensor]:
        """Return the state of the base class, θ_t and τ_max."""
        return super().state() | tagged("trained", self.trained) | tagged("vector", self.vector)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the state of the base class, θ_t and τ_max."""
        super().restore(state)
        self.trained = untagged("trained", state, self.context.device)
        self.vector = untagged("vector", state, self.context.device)
