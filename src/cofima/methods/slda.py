r"""SLDA: linear discriminant analysis on a frozen backbone.

Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR Workshops
2020, https://arxiv.org/abs/1909.01520. Each class has a mean :math:`\mu_c`, and all classes share one
covariance :math:`S_a`, the within-class scatter of all images so far, shrunk toward the identity:

.. math:: \hat y = \arg\max_c\ \mu_c^\top S_a^{-1} f_{\theta_0}(x)
                   - \tfrac12 \mu_c^\top S_a^{-1} \mu_c + \log \pi_c

Everything is computed from sums over images, so that any split into tasks gives the same means and
covariance.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.closed_form import ClosedFormOptions, Shrinkage, shrink
from cofima.methods.components.discriminant import (
    DISCRIMINANT,
    Priors,
    SharedGaussians,
    class_shares,
    discriminant,
)
from cofima.methods.components.gaussians import by_class
from cofima.methods.state import Entry, tagged, untagged
from cofima.training.context import NO_HOOKS, Hooks


@dataclass(eq=False)
class SLDA(Method):
    """Classify by class means and one shared covariance; nothing is trained.

    Args:
        priors: Class priors, all equal or proportional to the number of images (counts).
        shrinkage: Share of the identity in the covariance: by formula (oas), the one with the lowest
            leave-one-out loss over all images so far (loo), or a number.
    """

    priors: Priors = "equal"
    shrinkage: Shrinkage = "loo"

    fixed_features: ClassVar[bool] = True
    can_refine: ClassVar[bool] = True
    can_refine_one_class: ClassVar[bool] = True
    label: ClassVar[str] = "SLDA"
    paper: ClassVar[str] = "Hayes and Kanan, CVPR Workshops 2020, https://arxiv.org/abs/1909.01520"
    equation: ClassVar[str] = "W = S_a⁻¹ M,  b_c = -½ μ_cᵀ S_a⁻¹ μ_c + log π_c;  argmax W f_θ0(x) + b"
    state_schema: ClassVar[tuple[Entry, ...]] = DISCRIMINANT

    def train(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Train nothing."""
        self.net.eval()

    def end(self, task: Task) -> None:
        """Add the task's images to the means and the covariance, and solve for the whole head."""
        if task.index == 0:
            self.gaussians = SharedGaussians(self.net.head.features)
        with self.timed("statistics"):
            features, labels = self.features(task.train), task.train.labels
            mine = by_class(features, labels)
            for label in task.classes:
                self.gaussians.add(mine[label])
            for label in task.known:
                self.gaussians.pool(label, mine[label])
        with self.timed("solve"):
            how = ClosedFormOptions(priors=self.priors, shrinkage=self.shrinkage)
            self.facts["notes"].append(shrink(self.gaussians, features, labels, how, "lda"))
            self.solve()

    def solve(self) -> None:
        """Load the head given by means and covariance."""
        self.net.head.load_flat(*discriminant(self.gaussians, self.priors))

    def class_shares(self) -> Tensor | None:
        """Return the share of images per class if they are used as priors."""
        return class_shares(self.gaussians.counts, self.priors)

    def class_statistics(self) -> SharedGaussians:
        """Return the means and the covariance."""
        return self.gaussians

    def state(self) -> dict[str, Tensor]:
        """Return the means and the scatter."""
        return tagged("discriminant", self.gaussians.state())

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the sums, and solve again: merged sums give another head than the merged weights."""
        self.gaussians = SharedGaussians.restore(untagged("discriminant", state), self.net.head.features)
        self.solve()
