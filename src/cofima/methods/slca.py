r"""SLCA: a slow learner, and a head aligned with Gaussians of all classes.

Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained
Model", ICCV 2023, https://arxiv.org/abs/2303.05118. The backbone is fine-tuned with a low learning rate; a
Gaussian :math:`\mathcal N(\mu_c, \Sigma_c)` of the features is stored for each class; after each task except
the first, a copy of the head is trained on features drawn from all Gaussians and used for prediction.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from cofima.methods.components.aligned import SLOW_LEARNER, Aligned


@dataclass(eq=False)
class SLCA(Aligned):
    """Fine-tune the backbone slowly, then align the head."""

    label: ClassVar[str] = "SLCA"
    paper: ClassVar[str] = "Zhang et al., ICCV 2023, https://arxiv.org/abs/2303.05118"
    equation: ClassVar[str] = "θ*_t = θ_t;  head: CE(z / (n(z) τ), y) on features from N(s_c μ_c, Σ_c)"
    is_fallback: ClassVar[bool] = True
    fallback_options: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"classifier": "lda"})

    def first_task_key(self) -> tuple[Any, ...]:
        """Return the options that affect the class statistics: nothing is aligned yet."""
        return (SLOW_LEARNER, *self.head_key())
