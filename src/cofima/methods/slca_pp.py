r"""SLCA++: SLCA with low-rank updates of the backbone and a symmetric cross-entropy.

Zhang et al., "SLCA++: Unleash the Power of Sequential Fine-tuning for Continual Learning with Pre-training",
2024, https://arxiv.org/abs/2408.08295. The backbone is trained by LoRA, and the loss adds the cross-entropy
with prediction and label exchanged, where :math:`\log 0` is replaced by a number :math:`Z`,

.. math:: L = a\, \mathrm{CE}(y, p) + b\, \mathrm{CE}(p, y), \qquad
          \mathrm{CE}(p, y) = -\sum_k p_k \log y_k = -Z\, (1 - p_y)

Class Gaussians and alignment are those of SLCA.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

from cofima.methods.components.aligned import Aligned
from cofima.training.options import LoraOptions

Factor = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(eq=False)
class SLCApp(Aligned):
    """Fine-tune the backbone by LoRA with a symmetric loss, then align the head.

    Args:
        forward_weight: Weight of the cross-entropy.
        reverse_weight: Weight of the cross-entropy with prediction and label exchanged; 0 is SLCA's loss.
        log_zero: Value of log 0 in the reverse cross-entropy.
    """

    forward_weight: Factor = 1.0
    reverse_weight: Factor = 1.0
    log_zero: Annotated[float, Field(lt=0, allow_inf_nan=False)] = -4.0

    label: ClassVar[str] = "SLCA++"
    paper: ClassVar[str] = "Zhang et al., 2024, https://arxiv.org/abs/2408.08295"
    equation: ClassVar[str] = "W = W_0 + α/r B A;  L = a CE(y, p) + b CE(p, y), log 0 = -4;  head as in SLCA"
    default_lora: ClassVar[LoraOptions] = LoraOptions(rank=4, alpha=3.2)  # alpha / rank: a scale of 0.8

    def first_task_key(self) -> tuple[Any, ...]:
        """Return the options that affect the loss and the class statistics: nothing is aligned yet."""
        return ("slca_pp", self.forward_weight, self.reverse_weight, self.log_zero, *self.head_key())

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the symmetric cross-entropy."""
        forward = cross_entropy(logits, labels)
        return self.forward_weight * forward + self.reverse_weight * self.reverse(logits, labels)

    def reverse(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy with prediction and label exchanged: log 1 = 0, log 0 = ``log_zero``."""
        right = softmax(logits.float(), dim=1).gather(1, labels[:, None])
        return -self.log_zero * (1 - right).mean()
