r"""L2P, Learning to Prompt.

Wang et al., "Learning to Prompt for Continual Learning", CVPR 2022, https://arxiv.org/abs/2112.08654.
The backbone :math:`f` is frozen. Each image selects from a pool the :math:`k` prompts whose keys are nearest
to its query :math:`q = f(x)`; they are added to its tokens, and the input of the head is the mean output at
their positions,

.. math:: \min_{P, k, w}\ \mathrm{CE}\big(z(x; P_{s}),\ y\big) - \gamma \sum_{i \in s} \cos(q, k_i),
          \qquad s = \operatorname{top}_k \cos(q, k)
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cofima.data.stream import Task
from cofima.methods.components.prompted import Count, Prompted, Weight
from cofima.methods.components.prompts import Pool, mean_of_tokens, uniform, voted


@dataclass(eq=False)
class L2P(Prompted):
    """Learn a pool of prompts for a frozen backbone; each image selects prompts by key.

    Args:
        prompts: Number of prompts in the pool, which all tasks share.
        length: Tokens per prompt.
        top_k: Number of prompts that an image uses.
        vote: In training, all images of a batch use the prompts that most of them would select.
    """

    gamma: Weight = 0.1
    prompts: Count = 10
    length: Count = 5
    top_k: Count = 5
    vote: bool = False

    def __post_init__(self) -> None:
        if self.top_k > self.prompts:
            raise ValueError(f"top_k = {self.top_k}: the pool has only {self.prompts} prompts")

    label: ClassVar[str] = "L2P"
    paper: ClassVar[str] = "Wang et al., CVPR 2022, https://arxiv.org/abs/2112.08654, Eq. 5"
    equation: ClassVar[str] = "min CE(z(x; P_s), y) - γ Σ_{i in s} cos(q, k_i),  s = top_k cos(q, k)"

    def begin(self, task: Task) -> None:
        """Draw the pool before the first task."""
        if task.index == 0:
            chance, width = self.context.seeds.generator("prompts"), self.net.head.features
            pool = Pool()
            pool.add(
                uniform((self.prompts, self.length, width), chance), uniform((self.prompts, width), chance)
            )
            self.hold(pool)
        super().begin(task)

    def nearest(self, similarity: Tensor) -> Tensor:
        """Return the ``top_k`` prompts with the nearest keys."""
        return similarity.topk(self.top_k).indices

    def choose(self, similarity: Tensor) -> Tensor:
        """Return the nearest prompts, or those selected by most images of the batch."""
        chosen = self.nearest(similarity)
        return voted(chosen, self.prompts) if self.vote else chosen

    def logits(self, images: Tensor, chosen: Tensor) -> Tensor:
        """Return the head's logits for the mean output at the prompts' positions."""
        tokens = self.pool.take(chosen).flatten(1, 2)
        logits: Tensor = self.net.head(mean_of_tokens(self.net.backbone, images, tokens))
        return logits
