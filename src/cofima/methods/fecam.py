r"""FeCAM: Mahalanobis distances to class means, on a frozen backbone.

Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual
Learning", NeurIPS 2023, https://arxiv.org/abs/2309.14062. Features are transformed (Tukey) and normalized to
unit length; each class has a mean and a covariance, which is shrunk and normalized to correlations,

.. math:: z = \frac{f_{\theta_0}(x)^{p}}{\lVert f_{\theta_0}(x)^{p} \rVert}, \qquad
          S_c = \Sigma_c + \gamma_1 v_c I + \gamma_2 m_c (\mathbf 1 \mathbf 1^\top - I), \qquad
          (R_c)_{ij} = \frac{(S_c)_{ij}}{\sqrt{(S_c)_{ii} (S_c)_{jj}}}

with the mean :math:`v_c` of the diagonal of :math:`\Sigma_c` and :math:`m_c` of its other entries, and

.. math:: \hat y = \arg\min_c\ (z - \mu_c)^\top R_c^{-1} (z - \mu_c)
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from cofima.core.errors import CofimaError
from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.mahalanobis import CORRELATION, Correlation, MahalanobisHead
from cofima.methods.state import Entry, tagged, untagged
from cofima.models.net import Net
from cofima.training.context import NO_HOOKS, Context, Hooks

TUKEY = 0.5


@dataclass(eq=False)
class FeCAM(Method):
    """Classify by mean and correlation matrix of each class's features; nothing is trained.

    Args:
        power: Exponent of Tukey's transformation; 1 for none. ``auto`` is 0.5 if no feature of the first
            task is negative, as after a ReLU, otherwise 1, as for vision transformers.
        gamma_1: Multiple of the mean variance added to the variances.
        gamma_2: Multiple of the mean covariance added to the covariances; at most ``gamma_1``. ``auto`` is
            ``gamma_1`` if features are transformed, otherwise 0.
    """

    power: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    gamma_1: Annotated[float, Field(gt=0)] = 1.0
    gamma_2: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.gamma_2 != "auto" and self.gamma_2 > self.gamma_1:
            raise ValueError("gamma_2 exceeds gamma_1: then the shrunk covariance may have no inverse")

    fixed_features: ClassVar[bool] = True
    label: ClassVar[str] = "FeCAM"
    paper: ClassVar[str] = "Goswami et al., NeurIPS 2023, https://arxiv.org/abs/2309.14062"
    equation: ClassVar[str] = (
        "argmin_c (z - μ_c)ᵀ R_c⁻¹ (z - μ_c),  z = f^p / |f^p|,  R_c: shrunk correlations"
    )
    state_schema: ClassVar[tuple[Entry, ...]] = (CORRELATION, Entry("power"))

    def setup(self, net: Net, context: Context) -> None:
        """Replace the network's head with one of distances."""
        super().setup(net, context)
        self.readout = net.head = MahalanobisHead(net.head.features, net.head.sizes)
        net.to(context.device)

    def train(self, task: Task, hooks: Hooks = NO_HOOKS) -> None:
        """Train nothing."""
        self.net.eval()

    def end(self, task: Task) -> None:
        """Store mean and correlations of each new class."""
        with self.timed("statistics"):
            features, labels = self.features(task.train), task.train.labels
            if task.index == 0:
                self.readout.power = self.choose_power(float(features.min()))
                self.facts["notes"].append(f"features to the power {self.readout.power:g}")
            gammas = self.gamma_1, self.chosen_gamma_2()
            flat, z = self.readout.flat(), self.readout.transformed(features.double())
            for label in task.classes:
                mine = z[labels == label]
                flat["weight"][label] = mine.mean(0).to(flat["weight"])
                self.readout.matrices.append(Correlation.of(mine, *gammas))
            flat["bias"].zero_()
            self.readout.load_flat(**flat)

    def choose_power(self, smallest: float) -> float:
        """Return the exponent, given the smallest feature; raise if that has no such power."""
        if self.power == "auto":
            return TUKEY if smallest >= 0 else 1.0
        if self.power != 1 and smallest < 0:
            raise CofimaError(
                f"options.power = {self.power:g}: a negative feature ({smallest:.3g}) has no such power; "
                "leave it out, or give 1 for backbones that do not end in a ReLU"
            )
        return self.power

    def chosen_gamma_2(self) -> float:
        """Return the weight of the mean covariance; ``auto`` depends on the exponent."""
        if self.gamma_2 != "auto":
            return self.gamma_2
        return 0.0 if self.readout.power == 1 else self.gamma_1

    def state(self) -> dict[str, Tensor]:
        """Return the correlations and the exponent; the means are the rows of the head."""
        power = torch.tensor(self.readout.power, dtype=torch.float64)
        return tagged("correlation", self.readout.state()) | {"power": power}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state`."""
        self.readout.power = float(state["power"])
        self.readout.restore(untagged("correlation", state))
