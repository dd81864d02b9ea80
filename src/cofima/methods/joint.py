r"""Joint training on all classes and images at once; the upper bound.

.. math:: \theta = \arg\min_\theta \mathrm{CE}\big(z(x; \theta),\ y\big)
          \quad \text{over } D_1 \cup \dots \cup D_T
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from cofima.data.stream import Stream
from cofima.methods.base import Method
from cofima.methods.components.cost import Cost, Plan


@dataclass(eq=False)
class Joint(Method):
    """Train on all classes as one task; only its last accuracy is comparable with other methods."""

    label: ClassVar[str] = "Joint"
    paper: ClassVar[str] = "the upper bound of every comparison: it keeps all images"
    equation: ClassVar[str] = "θ = argmin CE over all classes and all images, from θ_0"

    all_at_once: ClassVar[bool] = True
    can_extend: ClassVar[bool] = False

    def cost(self, plan: Plan) -> Cost:
        """Return the cost of a single task."""
        return super().cost(replace(plan, tasks=1))

    def stream(self, stream: Stream) -> Stream:
        """Return one task with all classes."""
        return stream.merged()
