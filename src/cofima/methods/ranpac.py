r"""RanPAC: a backbone adapted once, a random projection, and ridge regression over all images.

McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", NeurIPS
2023, https://arxiv.org/abs/2307.02251. The first task adapts the backbone, which is then frozen, and

.. math:: h = \mathrm{ReLU}(P^\top f(x)), \quad P_{ij} \sim \mathcal N(0, 1), \qquad
          W = \Big(\sum_x h h^\top + \rho I\Big)^{-1} \sum_x h\, y^\top, \qquad
          \hat y = \arg\max_c\ (h^\top W)_c
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from cofima.core.errors import CofimaError
from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.adapters import Adapt, Petl, adapt, insert, unsuited
from cofima.methods.components.closed_form import READOUT, ClosedFormOptions, RidgeReadout
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.state import Entry, tagged, untagged
from cofima.models.net import Net
from cofima.training.context import NO_HOOKS, Context, Hooks

PAPER_PROJECTION = 10_000


@dataclass(eq=False)
class RanPAC(Method):
    """Adapt to the first task, then solve a ridge regression on random hidden features.

    Args:
        petl: Adaptation of the backbone in the first task: adapters parallel to the MLPs, scale and shift of
            every layer (ssf), prompt tokens in every block (vpt), or none.
        projection: Number of hidden features.
        ridge: Regularization strength; ``auto`` selects the power of ten from 1e-8 to 1e8 that is best on a
            held-out fifth of each task's training images.
        adapt: Options of the adaptation.
    """

    petl: Petl = "adapter"
    projection: Annotated[int, Field(ge=1)] = PAPER_PROJECTION
    ridge: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    adapt: Adapt = field(default_factory=Adapt)

    fixed_features: ClassVar[bool] = True
    label: ClassVar[str] = "RanPAC"
    paper: ClassVar[str] = "McDonnell et al., NeurIPS 2023, https://arxiv.org/abs/2307.02251"
    equation: ClassVar[str] = "W = (Σ h hᵀ + ρ I)⁻¹ Σ h yᵀ,  h = ReLU(Pᵀ f(x));  argmax hᵀ W"
    options_for_any_backbone: ClassVar[dict[str, Any]] = {"petl": "none"}
    can_refine: ClassVar[bool] = True
    can_refine_one_class: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = READOUT

    def cost(self, plan: Plan) -> Cost:
        """Add the adaptation to the first task."""
        epochs = 0 if self.petl == "none" else self.adapt.epochs
        return super().cost(plan).plus(steps=plan.train / plan.tasks * epochs)

    def check(self, backbone: nn.Module) -> None:
        """Raise if a backbone cannot be adapted as configured."""
        if problem := unsuited(backbone, self.petl):
            raise CofimaError(f"RanPAC: {problem}")

    def setup(self, net: Net, context: Context) -> None:
        """Insert the adaptation modules, and replace the head with one on projected features."""
        super().setup(net, context)
        seeds, head = context.seeds, net.head
        self.inserted = insert(net.backbone, self.petl, self.adapt, seeds.generator("petl"))
        how = ClosedFormOptions(projection=self.projection, ridge=self.ridge)
        self.readout = RidgeReadout(head.features, how, seeds)
        net.head = self.readout.blank.with_blocks(head.sizes)
        net.to(context.device)

    def train(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Adapt the backbone to the first task, if it has more than one class."""
        if task.index == 0 and self.inserted:
            with self.timed("train"):
                features, how = len(self.readout.blank.matrix), self.adapt
                done = adapt(self.net.backbone, features, self.inserted, task.train, how, self.context, hooks)
            if not done:
                self.note("the first task has one class: nothing to tell apart, so nothing is adapted")
        self.net.eval()

    def end(self, task: Task) -> None:
        """Add the task's images to the sums, and solve for the whole head."""
        if task.index == 0:
            self.readout.clear()
            if self.projection < PAPER_PROJECTION:
                self.note(
                    f"{self.projection:,} hidden features, whose sums take {_megabytes(self.projection)} MB; "
                    f"the paper's {PAPER_PROJECTION:,} would take {_megabytes(PAPER_PROJECTION)}"
                )
        with self.timed("statistics"):
            features, labels = self.features(task.train), task.train.labels
            self.readout.add(features, labels, task.classes.stop, task.index)
        with self.timed("solve"):
            self.net.head.load_flat(*self.readout.solve())
        self.facts["notes"].append(f"ridge {self.readout.chosen:g}")

    def state(self) -> dict[str, Tensor]:
        """Return the sums and the ridge, and a few elements of the projection to verify it."""
        return tagged("readout", self.readout.state())

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the sums; raise if they were computed with another projection."""
        self.readout.restore(untagged("readout", state))


def _megabytes(width: int) -> str:
    """Return the size of the packed sums for ``width`` hidden features, in megabytes, as text."""
    return f"{8 * width * (width + 1) / 2 / 1e6:,.3g}"
