r"""Seq FT: plain sequential fine-tuning.

The lower bound. Its rows in the paper use the slow learner (a small learning rate for the backbone)
and cross-entropy over the current task's classes,

.. math:: \theta_t = \arg\min_\theta \mathrm{CE}\big(z_{[K_{t-1}:K_t]}(x; \theta),\ y\big)
          \quad \text{from } \theta_{t-1}
"""

from dataclasses import dataclass
from typing import ClassVar

from cofima.methods.base import Method


@dataclass(eq=False)
class SeqFT(Method):
    """Fine-tune on each task, starting from the weights after the previous one."""

    label: ClassVar[str] = "Seq FT"
    paper: ClassVar[str] = (
        "the lower bound of every comparison; slow learner as in https://arxiv.org/abs/2303.05118"
    )
    can_refine: ClassVar[bool] = True
    is_fallback: ClassVar[bool] = True
    equation: ClassVar[str] = "θ_t = argmin CE over the classes of task t, from θ_{t-1}"
