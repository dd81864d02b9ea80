r"""Prototype classifier: cosine similarity to class means, on a frozen backbone.

Janson et al., "A Simple Baseline that Questions the Use of Pretrained-Models in Continual Learning",
2022, https://arxiv.org/abs/2210.04428, with cosine similarity instead of their distance. The prototype of a
class is the mean of its images' features,

.. math:: p_c = \frac1{n_c} \sum_{x \in c} f_{\theta_0}(x), \qquad
          \hat y = \arg\max_c \cos\big(f_{\theta_0}(x), p_c\big)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.training.context import NO_HOOKS, Hooks


@dataclass(eq=False)
class Prototype(Method):
    """Classify by the mean feature of each class; nothing is trained."""

    fixed_features: ClassVar[bool] = True
    unmergeable_rows: ClassVar[str] = (
        "the average of two prototypes of length 1 is shorter, unlike those of others; "
        "learn it anew from its images"
    )
    label: ClassVar[str] = "Prototype"
    paper: ClassVar[str] = "Janson et al., 2022, https://arxiv.org/abs/2210.04428 (there with the distance)"
    equation: ClassVar[str] = "p_c = mean of f_θ0(x) over the class;  argmax_c cos(f_θ0(x), p_c)"

    def train(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Train nothing."""
        self.net.eval()

    def end(self, task: Task) -> None:
        """Set the new rows of the head to the prototypes of the new classes."""
        with self.timed("statistics"):
            features = self.features(task.train)
        means = torch.stack([features[task.train.labels == label].double().mean(0) for label in task.classes])
        self.net.head.load_flat(**self.with_rows(task, means / means.norm(dim=1, keepdim=True)))

    def with_rows(self, task: Task, directions: Tensor) -> dict[str, Tensor]:
        """Return the head with unit-length prototypes as its last rows.

        The logits are then cosines times the norm of the feature, which does not change the order of classes.
        """
        flat = self.net.head.flat()
        flat["weight"][task.classes.start :] = directions.to(flat["weight"])
        flat["bias"].zero_()
        return flat
