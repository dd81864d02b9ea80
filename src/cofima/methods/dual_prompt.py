r"""DualPrompt: prompts shared by all tasks, and prompts for each task.

Wang et al., "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning", ECCV 2022,
https://arxiv.org/abs/2204.04799. The backbone :math:`f` is frozen. Prefixes are added to the keys and values
of its attention: :math:`g`, shared by all tasks, in the first layers, and :math:`e_t`, one per task, in the
following layers,

.. math:: \min_{g, e_t, k_t, w}\ \mathrm{CE}\big(z(x; g, e_t),\ y\big) - \gamma \cos(q, k_t),
          \qquad q = f(x)

At test time an image uses the :math:`e_t` whose key :math:`k_t` is nearest to its query :math:`q`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from cofima.core.errors import CofimaError
from cofima.data.stream import Task
from cofima.methods.components.prompted import Count, Prompted
from cofima.methods.components.prompts import PROMPTS, Pool, prefix_problem, prefixes, uniform
from cofima.methods.state import Entry

Layers = tuple[Annotated[int, Field(ge=0)], ...]


@dataclass(eq=False)
class DualPrompt(Prompted):
    """Learn prefixes for a frozen backbone: one shared by all tasks, and one per task.

    Args:
        g_layers: Layers with the prefix shared by all tasks, counted from 0.
        g_length: Length of the shared prefix.
        e_layers: Layers with the prefix of the task.
        e_length: Length of the task's prefix.
    """

    g_layers: Layers = (0, 1)
    g_length: Count = 5
    e_layers: Layers = (2, 3, 4)
    e_length: Count = 5

    def __post_init__(self) -> None:
        layers = [*self.g_layers, *self.e_layers]
        if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
            raise ValueError(f"g_layers and e_layers: layer {' and '.join(map(str, twice))} is there twice")

    state_schema: ClassVar[tuple[Entry, ...]] = (*PROMPTS, Entry("shared", predicts="prompts"))
    grows_with_tasks: ClassVar[bool] = True  # one prompt and one key per task
    label: ClassVar[str] = "DualPrompt"
    paper: ClassVar[str] = "Wang et al., ECCV 2022, https://arxiv.org/abs/2204.04799, Eq. 6"
    equation: ClassVar[str] = "min CE(z(x; g, e_t), y) - γ cos(q, k_t);  at test e_s, s = argmax cos(q, k)"

    def check(self, backbone: nn.Module) -> None:
        """Raise if the backbone lacks a layer with a prefix, or is not supported."""
        super().check(backbone)
        if problem := prefix_problem(backbone, (*self.g_layers, *self.e_layers)):
            raise CofimaError(f"options.g_layers, options.e_layers: {problem}")

    def begin(self, task: Task) -> None:
        """Initialize the task's prefix with that of the previous task, and draw a new key."""
        chance, width = self.context.seeds.generator("prompts", task.index), self.net.head.features
        if task.index == 0:
            self.share(uniform((len(self.g_layers), 2, self.g_length, width), chance))
            self.hold(Pool())
            start = uniform((1, len(self.e_layers), 2, self.e_length, width), chance)
        else:
            start = self.pool.prompts[-1][-1:]
        self.pool.add(start, uniform((1, width), chance))
        self.pool.to(self.context.device)
        super().begin(task)

    def share(self, prefix: Tensor) -> None:
        """Attach the shared prefix [layers, 2, length, width] to the network."""
        self.net.shared = self.shared = nn.Parameter(prefix.to(self.context.device))

    def choose(self, similarity: Tensor) -> Tensor:
        """Return the task's own prefix for every image, in training."""
        return torch.full((len(similarity), 1), self.task.index, device=similarity.device)

    def logits(self, images: Tensor, chosen: Tensor) -> Tensor:
        """Return the logits with the shared prefix and the one selected for each image."""
        shared = self.shared.expand(images.shape[0], *self.shared.shape)  # an export would freeze len()
        own = self.pool.take(chosen[:, 0])
        by_layer = zip((*self.g_layers, *self.e_layers), (*shared.unbind(1), *own.unbind(1)), strict=True)
        with prefixes(self.net.backbone, dict(by_layer)):
            logits: Tensor = self.net(images)
        return logits

    def state(self) -> dict[str, Tensor]:
        """Return the prompts, their keys, and the shared prefix."""
        return super().state() | {"shared": self.shared.detach()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore prompts, keys, and the shared prefix."""
        super().restore(state)
        self.share(state["shared"])
