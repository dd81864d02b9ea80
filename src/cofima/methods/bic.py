r"""BiC, Bias Correction.

Wu et al., "Large Scale Incremental Learning", CVPR 2019, https://arxiv.org/abs/1905.13260. Exemplars
of old classes and the new images are learned together with distillation,

.. math:: L = \Lambda\, \mathrm{KD}_T\big(z_{[1:K_{t-1}]}, \hat z\big) + (1 - \Lambda)\, \mathrm{CE}(z, y),
          \qquad \Lambda = K_{t-1} / K_t

then :math:`\alpha z_k + \beta` for the new classes is fitted on a balanced held-out part of both.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from cofima.data.image_set import Images
from cofima.data.stream import Stream, Task
from cofima.methods.base import Method
from cofima.methods.components import replay
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.distillation import distillation, teacher_of
from cofima.methods.state import Entry
from cofima.models.net import Net
from cofima.training.context import Batch, Context
from cofima.training.loop import batches, plain_batches


class Correction(BaseModel):
    """Options of the bias correction, which Adam fits on cached logits."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    epochs: Annotated[int, Field(ge=0)] = 200
    """Epochs on the held-out images; 0 disables the correction."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of Adam."""


@dataclass(eq=False)
class BiC(Method):
    """Train with exemplars and distillation, then correct the bias toward new classes.

    Args:
        memory_size: Total number of stored images, the same for each class.
        selection: Selection of exemplars: features close to the class mean (herding), or random.
        validation: Share of a class's exemplars held out to fit the correction; as many of each new class.
        temperature: Softmax temperature of both predictions in the distillation.
        correction: Options of the correction.
    """

    memory_size: replay.MemorySize = 2000
    selection: Literal["herding", "random"] = "herding"
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    correction: Correction = field(default_factory=Correction)

    label: ClassVar[str] = "BiC"
    paper: ClassVar[str] = "Wu et al., CVPR 2019, https://arxiv.org/abs/1905.13260"
    equation: ClassVar[str] = "L = Λ KD_T(z_old, ẑ) + (1-Λ) CE(z, y), Λ = K_{t-1}/K_t;  new: α z + β"
    frozen_old_heads: ClassVar[bool] = False
    keeps_images: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = (replay.MEMORY,)

    def cost(self, plan: Plan) -> Cost:
        """Add exemplars, of which old classes have half on average, the teacher, and herding."""
        exemplars = min(self.memory_size, plan.train) * (plan.tasks - 1) / 2
        return super().cost(plan).plus(plan.epochs * exemplars, plan.epochs * plan.later + plan.train)

    def stream(self, stream: Stream) -> Stream:
        """Raise, before any work, if the memory cannot hold two images per class."""
        replay.check_memory_size(self.memory_size, len(stream.class_names), each=2)
        return stream

    def begin(self, task: Task) -> None:
        """Copy the corrected network as the teacher, and hold out a balanced set of images."""
        replay.check_memory_size(self.memory_size, task.classes.stop, each=2)
        if task.index == 0:
            self.memory = replay.empty_memory(task.train)
        else:
            self.teacher = teacher_of(self.net)
            generator = self.context.seeds.generator("held out", task.index)
            self.training_images, self.held_out = replay.hold_out(
                self.memory, task.train, self.validation, generator
            )
        super().begin(task)

    def data(self, task: Task) -> Images:
        """Return the exemplars and the new images, except the held-out ones."""
        return self.training_images if task.index > 0 else task.train

    def loss(self, batch: Batch) -> Tensor:
        """Return distillation of old classes and cross-entropy of all, weighted by their numbers."""
        logits = self.net(batch.images)
        loss = cross_entropy(logits, batch.labels)
        if self.task.index > 0:
            old = self.teacher(batch.images)
            known, share = old.shape[1], old.shape[1] / logits.shape[1]
            loss = share * distillation(logits[:, :known], old, self.temperature) + (1 - share) * loss
        return loss

    def end(self, task: Task) -> None:
        """Correct the new rows; reduce the exemplars of old classes, and select those of new ones."""
        if task.index > 0:
            with self.timed("correct"):
                fitted = correct(self.net, self.held_out, self.correction, self.context, task.index)
            self.note("correction of the new classes: alpha {:.3f}, beta {:.3f}".format(*fitted))
            del self.teacher, self.training_images, self.held_out
        with self.timed("memory"):
            quota = self.memory_size // task.classes.stop
            features = self.features(task.train) if self.selection == "herding" else None
            generator = self.context.seeds.generator("exemplars", task.index)
            self.memory = replay.with_exemplars(self.memory, task.train, quota, features, generator)

    def state(self) -> dict[str, Tensor]:
        """Return the exemplars, best first."""
        return replay.memory_state(self.memory)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the exemplars."""
        self.memory = replay.restore_memory(state)


def correct(net: Net, images: Images, how: Correction, context: Context, task: int) -> tuple[float, float]:
    """Fit alpha and beta of the newest classes on ``images``, apply them to their rows, and return them."""
    with torch.inference_mode():
        pairs = [(net(x).float(), y) for x, y in plain_batches(images, context, "correct")]
    logits, labels = (torch.cat(part).clone() for part in zip(*pairs, strict=True))
    generator, old = context.seeds.generator("correction", task), net.head.spans[-1].start
    alpha, beta = fit_correction(logits, labels, old, how, context.train.batch_size, generator)
    with torch.no_grad():
        weight, bias = net.head.blocks[-1].parameters()
        weight.mul_(alpha)
        bias.mul_(alpha).add_(beta)
    return alpha, beta


def fit_correction(
    logits: Tensor, labels: Tensor, old: int, how: Correction, batch: int, generator: torch.Generator
) -> tuple[float, float]:
    """Return alpha and beta of the classes after the first ``old``, fitted by cross-entropy."""
    alpha = torch.ones((), device=logits.device, requires_grad=True)
    beta = torch.zeros((), device=logits.device, requires_grad=True)
    optimizer = torch.optim.Adam([alpha, beta], how.lr)
    for _ in range(how.epochs):
        for index in batches(len(labels), batch, generator) if len(labels) else []:
            at = index.to(logits.device)
            corrected = torch.cat([logits[at, :old], alpha * logits[at, old:] + beta], dim=1)
            loss = cross_entropy(corrected, labels[at])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    return float(alpha.detach()), float(beta.detach())
