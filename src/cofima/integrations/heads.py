"""Heads for all classes seen, computed from feature statistics, for models with a last linear layer."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cofima.core.errors import CofimaError
from cofima.core.progress import SILENT, Progress
from cofima.core.seeds import Seeds
from cofima.integrations.batches import Logits
from cofima.methods.components.alignment import AlignOptions, align, task_of_class
from cofima.methods.components.closed_form import ClosedFormOptions, discriminant_head, shrink
from cofima.methods.components.discriminant import SharedGaussians
from cofima.methods.components.gaussians import ClassGaussians, by_class, mean_scale
from cofima.models.head import Head

HeadKind = Literal["sgd", "lda"]


@dataclass(frozen=True)
class _AlignContext:
    """The part of a training context that an alignment needs."""

    device: torch.device
    seeds: Seeds = field(default_factory=lambda: Seeds(0))
    progress: Progress = SILENT


class ClassHeads:
    """Feature Gaussians of all classes so far, in order of arrival, and the heads computed from them."""

    def __init__(self) -> None:
        self.labels: list[int] = []
        """The row of each class in the model's head."""
        self.sizes: list[int] = []
        """Number of new classes in each task."""
        self.gaussians: ClassGaussians | SharedGaussians | None = None

    def align(
        self,
        logits: Logits,
        head: nn.Linear,
        loader: Iterable[Any],
        kind: HeadKind,
        options: AlignOptions | ClosedFormOptions | None,
    ) -> nn.Linear:
        """Store the statistics of a task's classes, and return the head for all classes so far."""
        how = options or (AlignOptions() if kind == "sgd" else ClosedFormOptions())
        if kind not in ("sgd", "lda") or isinstance(how, AlignOptions) != (kind == "sgd"):
            raise CofimaError(
                f"kind = {kind!r}: sgd takes AlignOptions, lda ClosedFormOptions; nothing else is"
            )
        if self.gaussians is not None and isinstance(self.gaussians, ClassGaussians) != (kind == "sgd"):
            raise CofimaError(f"kind = {kind!r}: the statistics so far are those of the other kind of head")
        features, labels = features_of(logits, head, loader)
        places = self._remember(features, labels, kind)
        known = Head(features.shape[1], self.sizes)
        rows = torch.tensor(self.labels)
        bias = torch.zeros(len(head.weight)) if head.bias is None else head.bias.detach().cpu().float()
        known.load_flat(head.weight.detach().cpu().float()[rows], bias[rows])
        if isinstance(self.gaussians, SharedGaussians):
            assert isinstance(how, ClosedFormOptions)
            shrink(self.gaussians, features, places, how, kind)
            known = discriminant_head(self.gaussians, how, self.sizes)
            bias = torch.full_like(bias, -torch.inf)
        elif self.gaussians is not None and len(self.sizes) > 1:
            assert isinstance(how, AlignOptions)
            scale = mean_scale(task_of_class(known))
            context = _AlignContext(head.weight.device)
            known.to(head.weight.device)
            known = align(known, self.gaussians, scale, how, context, len(self.sizes) - 1)
        return _with_rows(head, bias, known.flat(), rows)

    def _remember(self, features: Tensor, labels: Tensor, kind: HeadKind) -> Tensor:
        """Add new classes and pool known ones; return the index of each label among the classes."""
        if self.gaussians is None:
            self.gaussians = ClassGaussians() if kind == "sgd" else SharedGaussians(features.shape[1])
        mine = by_class(features, labels)
        new = [label for label in mine if label not in self.labels]
        for label in mine:
            if label in new:
                self.gaussians.add(mine[label])
            else:
                self.gaussians.pool(self.labels.index(label), mine[label])
        self.labels += new
        self.sizes += [len(new)] if new else []
        place = {label: at for at, label in enumerate(self.labels)}
        return torch.tensor([place[label] for label in labels.tolist()])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        shared = self.gaussians if isinstance(self.gaussians, SharedGaussians) else None
        return {
            "labels": self.labels,
            "sizes": self.sizes,
            "shared_width": 0 if shared is None else shared.width,
            "statistics": {} if self.gaussians is None else self.gaussians.state(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "ClassHeads":
        """Create an instance from a :meth:`state_dict`."""
        made = cls()
        made.labels, made.sizes = list(state["labels"]), list(state["sizes"])
        kept, width = state["statistics"], state["shared_width"]
        if kept:
            made.gaussians = SharedGaussians.restore(kept, width) if width else ClassGaussians.restore(kept)
        return made


@torch.no_grad()
def features_of(logits: Logits, head: nn.Linear, loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Return the features that reach the model's last layer, and their labels, on the CPU."""
    if not isinstance(head, nn.Linear) or all(head is not module for module in logits.model.modules()):
        raise CofimaError("head must be the nn.Linear of the model that returns its logits")
    caught: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: caught.append(given[0].detach().float().cpu()))
    labels = []
    try:
        logits.eval()
        for batch in logits.placed(loader):
            logits(batch)
            labels.append(logits.labels(batch).cpu())
    finally:
        hook.remove()
    features, found = torch.cat(caught), torch.cat(labels)
    if features.ndim != 2 or len(features) != len(found):
        raise CofimaError(
            f"the head sees features of shape {list(features.shape)} for {len(found)} labels; an alignment "
            "needs one row for each"
        )
    return features, found


def _with_rows(head: nn.Linear, bias: Tensor, flat: Mapping[str, Tensor], rows: Tensor) -> nn.Linear:
    """Return a copy of a head with this bias, and with new values in some of its rows."""
    made = copy.deepcopy(head)
    with torch.no_grad():
        made.bias = nn.Parameter(bias.to(head.weight))
        made.weight[rows] = flat["weight"].to(head.weight)
        made.bias[rows] = flat["bias"].to(head.weight)
    return made
