r"""GDumb: greedy balanced memory, and a network trained on the memory only.

Prabhu, Torr and Dokania, "GDumb: A Simple Approach that Questions Our Progress in Continual Learning",
ECCV 2020, https://www.robots.ox.ac.uk/~tvg/publications/2020/gdumb.pdf. After each task

.. math:: \theta_t = \arg\min_\theta \mathrm{CE}\big(z(x; \theta),\ y\big)
          \quad \text{over the memory } \mathcal M_t, \text{ from } \theta_0
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.data.image_set import ImageSet, concatenate
from cofima.data.stream import Stream, Task
from cofima.methods.base import Method
from cofima.methods.components.averaging import START
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.replay import (
    MEMORY,
    MemorySize,
    check_memory_size,
    empty_memory,
    greedy_balanced,
    memory_state,
    restore_memory,
)
from cofima.methods.state import Entry, tagged, untagged
from cofima.models.head import Head
from cofima.training.context import Batch
from cofima.weights.ops import snapshot


@dataclass(eq=False)
class GDumb(Method):
    """Maintain a balanced memory, and retrain on it from the pre-trained weights after each task.

    Args:
        memory_size: Total number of stored images.
    """

    memory_size: MemorySize = 2000

    label: ClassVar[str] = "GDumb"
    paper: ClassVar[str] = (
        "Prabhu et al., ECCV 2020, https://www.robots.ox.ac.uk/~tvg/publications/2020/gdumb.pdf"
    )
    equation: ClassVar[str] = "θ_t = argmin CE over a balanced memory M_t, from θ_0"
    frozen_old_heads: ClassVar[bool] = False
    keeps_images: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = (MEMORY, START)

    def cost(self, plan: Plan) -> Cost:
        """Count the growing memory in place of the task's images."""
        seen = [plan.train * (task + 1) / plan.tasks for task in range(plan.tasks)]
        return Cost(plan.epochs * sum(min(self.memory_size, n) for n in seen), super().cost(plan).forward)

    def stream(self, stream: Stream) -> Stream:
        """Raise, before any work, if there are more classes than the memory holds images."""
        check_memory_size(self.memory_size, len(stream.class_names))
        return stream

    def begin(self, task: Task) -> None:
        """Update the memory with the task's images; reset to the pre-trained backbone and a new head."""
        check_memory_size(self.memory_size, task.classes.stop)
        if task.index == 0:
            self.start = {key: value.cpu() for key, value in snapshot(self.net.backbone).items()}
            self.memory = empty_memory(task.train)
        self.memory = self.with_new(task.train, task.index)
        self.net.backbone.load_state_dict(self.start)
        generator, sizes = self.context.seeds.generator("head", task.index), self.net.head.sizes
        self.net.head = Head(self.net.head.features)
        for size in (*sizes, len(task.classes)):
            self.net.grow(size, generator, freeze=self.frozen_old_heads)

    def init_head(self, task: Task) -> None:
        """Initialize the rows of all classes, from the images in memory: the whole head is new."""
        super().init_head(replace(task, classes=range(task.classes.stop), train=self.memory))

    def with_new(self, images: ImageSet, task: int) -> ImageSet:
        """Return the memory after adding these images one by one, in random order."""
        generator = self.context.seeds.generator("memory", task)
        images = images.select(torch.randperm(len(images), generator=generator))
        held, labels = len(self.memory), torch.cat([self.memory.labels, images.labels])
        kept = greedy_balanced(labels, held, self.memory_size, generator)
        return concatenate(self.memory.select(kept[kept < held]), images.select(kept[kept >= held] - held))

    def data(self, task: Task) -> ImageSet:
        """Return the memory, the only training data."""
        return self.memory

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy over all classes seen."""
        return cross_entropy(self.net(batch.images), batch.labels)

    def state(self) -> dict[str, Tensor]:
        """Return the memory and the pre-trained weights."""
        return memory_state(self.memory) | tagged("start", self.start)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the memory and the pre-trained weights."""
        self.memory = restore_memory(state)
        self.start = untagged("start", state)
