r"""DER++, Dark Experience Replay.

Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple Baseline", NeurIPS 2020,
https://arxiv.org/abs/2004.07211. A memory holds images, labels, and the network's logits at the time each
image was stored; each training step also replays two draws from it,

.. math:: L = \mathrm{CE}\big(z(x), y\big) + \alpha\, \lVert z(x')_{[1:K']} - z' \rVert^2
          + \beta\, \mathrm{CE}\big(z(x''), y''\big)

with :math:`K'` the number of classes known when :math:`x'` was stored.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.distillation import known_mse
from cofima.methods.components.replay import MEMORY, MemorySize, Replayed, Reservoir
from cofima.methods.state import Entry
from cofima.training.context import Batch

Factor = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(eq=False)
class DERpp(Method):
    """Replay stored images with their stored logits and labels.

    Args:
        memory_size: Total number of stored images.
        alpha: Weight of the squared distance to the stored logits.
        beta: Weight of the cross-entropy with the stored labels.
    """

    memory_size: MemorySize = 2000
    alpha: Factor = 0.3
    beta: Factor = 0.5

    label: ClassVar[str] = "DER++"
    paper: ClassVar[str] = "Buzzega et al., NeurIPS 2020, https://arxiv.org/abs/2004.07211"
    equation: ClassVar[str] = "L = CE(z(x), y) + α |z(x')_{1:K'} - z'|² + β CE(z(x''), y'')"
    frozen_old_heads: ClassVar[bool] = False
    keeps_images: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = (MEMORY,)
    steps_change_state: ClassVar[bool] = True

    def cost(self, plan: Plan) -> Cost:
        """Add two draws from the memory per batch."""
        return super().cost(plan).plus(steps=2 * plan.epochs * plan.train)

    def begin(self, task: Task) -> None:
        """Grow the head, and create the task's random number generators."""
        if task.index == 0:
            self.memory = Reservoir(self.memory_size)
        chance = self.context.seeds.generator
        self.places, self.draws = chance("reservoir", task.index), chance("replay", task.index)
        super().begin(task)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy over all classes seen, plus the two replay terms."""
        logits = self.net(batch.images)
        self.logits = logits.detach()
        loss = cross_entropy(logits, batch.labels)
        if self.alpha and len(self.memory):
            again, kept = self.replay(batch)
            loss = loss + self.alpha * kept.known_weight * known_mse(again, kept.logits, kept.known)
        if self.beta and len(self.memory):
            again, kept = self.replay(batch)
            loss = loss + self.beta * kept.weight * cross_entropy(again, kept.labels)
        return loss

    def after_step(self, batch: Batch) -> None:
        """Add the batch to the reservoir, with its logits from before the step."""
        self.memory.add_shard(batch.shard, batch.pixels, batch.labels, self.logits, generator=self.places)

    def end(self, task: Task) -> None:
        """Fill the memory after a first task without training (a single class)."""
        if self.memory.seen == 0:
            with torch.no_grad():
                for index in torch.split(torch.arange(len(task.train)), self.context.train.batch_size):
                    pixels, labels = task.train.batch(index)
                    logits = self.net(self.context.view.test(pixels.to(self.context.device)))
                    self.memory.add(pixels, labels, logits, self.places)

    def replay(self, batch: Batch) -> tuple[Tensor, Replayed]:
        """Return current logits of newly augmented images from the memory, and their stored values."""
        kept = self.memory.replay(batch.shard, self.draws, self.context.device)
        return self.net(self.context.view.train(kept.pixels, self.draws, kept.part)), kept

    def state(self) -> dict[str, Tensor]:
        """Return the memory."""
        return self.memory.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the memory."""
        self.memory = Reservoir.restore(self.memory_size, state)
