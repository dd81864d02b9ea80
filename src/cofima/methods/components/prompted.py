"""Base of methods with prompts: a frozen vision transformer, prompts found by key, Adam."""

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
    """Learn prompts, their keys and the head; each image takes the prompts whose keys are nearest.

    The prompts are modules of the network, so that the training loop checks and cleans them as the head.

    Args:
        lr: Learning rate of Adam for a batch of 256; it grows and shrinks with ``train.batch_size``.
        clip: Largest norm of the gradient of a step, which is cut to it.
        gamma: Weight of the pull of keys towards the queries of the images that use their prompts.
    """

    lr: Annotated[float, Field(gt=0)] = 0.03
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    gamma: Weight = 1.0

    needs_vit: ClassVar[bool] = True
    state_schema: ClassVar[tuple[Entry, ...]] = PROMPTS
    frozen_backbone: ClassVar[bool] = True
    sees_features_only: ClassVar[bool] = False

    def cost(self, plan: Plan) -> Cost:
        """Count the queries, each image once."""
        return super().cost(plan).plus(forward=plan.train + plan.test)

    def hold(self, pool: Pool) -> None:
        """Keep the prompts."""
        self.net.prompts = self.pool = pool.to(self.context.device)

    def optimizer(self) -> Optimizer:
        """Return a new Adam over all that is not frozen."""
        return adam(trainable(self.net), self.lr * self.context.train.batch_size / 256, self.clip)

    def loss(self, batch: Batch) -> Tensor:
        """Return the local cross-entropy, less ``gamma`` times the similarity of the keys in use."""
        similarity = self.similarity(batch.images)
        chosen = self.choose(similarity)
        pull = similarity.gather(1, chosen).sum(1).mean()
        return self.local_loss(self.logits(batch.images, chosen), batch.labels) - self.gamma * pull

    def predict(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        """Let each image find its prompts alone, whatever stands beside it in the batch."""
        similarity = self.similarity(images) if queries is None else self.pool.similarity(queries)
        return self.logits(images, self.nearest(similarity))

    def score(self, seen: Sequence[Task]) -> Score:
        """Score with queries that are computed once for all tasks: they come from the backbone alone."""
        return evaluate(self.predict, seen, self.context, self.with_queries)

    def with_queries(self, images: ImageSet, label: str) -> Iterator[tuple[Tensor, ...]]:
        """Yield this process's images as they are seen at test time, their queries, and their labels."""
        part = distributed.current_shard(len(images))
        queries, start = self.cached_features(images, label), part.start
        for some, labels in plain_batches(images, self.context, label, part):
            yield some, queries[start : start + len(some)].to(some.device), labels
            start += len(some)

    def similarity(self, images: Tensor) -> Tensor:
        """Return the cosine of each image's query, its feature without prompts, and each key."""
        with torch.no_grad():
            query = self.net.features(images)
        return self.pool.similarity(query)

    def nearest(self, similarity: Tensor) -> Tensor:
        """Return the prompts that images take at test time [B, k], from similarities [B, prompts]."""
        return similarity.topk(1).indices

    def choose(self, similarity: Tensor) -> Tensor:
        """Return the prompts that images take in training [B, k]."""
        return self.nearest(similarity)

    def logits(self, images: Tensor, chosen: Tensor) -> Tensor:
        """Return the logits of all classes seen, with the prompts chosen for each image."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Keep the prompts and their keys."""
        return self.pool.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore prompts and keys."""
        self.hold(Pool.restore(state))
