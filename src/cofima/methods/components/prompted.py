"""Base class of prompt-based methods: a frozen vision transformer, prompts selected by key, Adam."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from cofima.core import distributed
from cofima.data.image_set import ImageSet
from cofima.data.stream import Task
from cofima.methods.base import Method
from cofima.methods.components.cost import Cost, Plan
from cofima.methods.components.prompts import PROMPTS, Pool, adam
from cofima.methods.state import Entry
from cofima.training.context import Batch
from cofima.training.evaluate import Score, evaluate
from cofima.training.loop import plain_batches, trainable

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]


@dataclass(eq=False)
class Prompted(Method):
    """Learn prompts, their keys and the head; each image uses the prompts with the nearest keys.

    The prompts are modules of the network, so that the training loop checks them and frees their gradients,
    as it does for the head.

    Args:
        lr: Learning rate of Adam for a batch of 256; it is scaled with ``train.batch_size``.
        clip: Maximum norm of the gradient; larger gradients are clipped to it.
        gamma: Weight of the term that pulls keys toward the queries of the images that use their prompts.
    """

    lr: Annotated[float, Field(gt=0)] = 0.03
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    gamma: Weight = 1.0

    needs_vit: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = PROMPTS
    frozen_backbone: ClassVar[bool] = True
    sees_features_only: ClassVar[bool] = False

    def cost(self, plan: Plan) -> Cost:
        """Add the queries: one pass per image."""
        return super().cost(plan).plus(forward=plan.train + plan.test)

    def hold(self, pool: Pool) -> None:
        """Attach the prompts to the network."""
        self.net.prompts = self.pool = pool.to(self.context.device)

    def optimizer(self) -> Optimizer:
        """Return a new Adam optimizer for all trainable parameters."""
        return adam(trainable(self.net), self.lr * self.context.train.batch_size / 256, self.clip)

    def loss(self, batch: Batch) -> Tensor:
        """Return the local loss minus ``gamma`` times the similarity of the selected keys."""
        similarity = self.similarity(batch.images)
        chosen = self.choose(similarity)
        pull = similarity.gather(1, chosen).sum(1).mean()
        return self.local_loss(self.logits(batch.images, chosen), batch.labels) - self.gamma * pull

    def predict(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        """Return logits; each image selects its prompts independently of the rest of the batch."""
        similarity = self.similarity(images) if queries is None else self.pool.similarity(queries)
        return self.logits(images, self.nearest(similarity))

    def score(self, seen: Sequence[Task]) -> Score:
        """Evaluate with cached queries, which depend only on the frozen backbone."""
        return evaluate(self.predict, seen, self.context, self.with_queries)

    def with_queries(self, images: ImageSet, label: str) -> Iterator[tuple[Tensor, ...]]:
        """Yield this process's images without augmentation, their queries, and their labels."""
        part = distributed.current_shard(len(images))
        queries, start = self.cached_features(images, label), part.start
        for some, labels in plain_batches(images, self.context, label, part):
            yield some, queries[start : start + len(some)].to(some.device), labels
            start += len(some)

    def similarity(self, images: Tensor) -> Tensor:
        """Return the cosine similarity of each image's query (its feature without prompts) and each key."""
        with torch.no_grad():
            query = self.net.features(images)
        return self.pool.similarity(query)

    def nearest(self, similarity: Tensor) -> Tensor:
        """Return the prompts selected at test time [B, k], given similarities [B, prompts]."""
        return similarity.topk(1).indices

    def choose(self, similarity: Tensor) -> Tensor:
        """Return the prompts selected in training [B, k]."""
        return self.nearest(similarity)

    def logits(self, images: Tensor, chosen: Tensor) -> Tensor:
        """Return the logits of all classes seen, with the prompts selected for each image."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return the prompts and their keys."""
        return self.pool.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore prompts and keys."""
        self.hold(Pool.restore(state))
