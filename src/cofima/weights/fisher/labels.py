"""Label modes of the Fisher information, as gradients of log p(y|x) with respect to the logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from cofima.core.errors import CofimaError, problems

LabelMode = Literal["data", "sampled", "exact"]

IGNORED = -100  # label of tokens without one: the default ``ignore_index`` of torch's losses


@dataclass(frozen=True)
class Labels:
    """Gradients at the logits for a label mode, one per backward pass.

    Args:
        mode: The given labels, one draw from the model for each sample, or the expectation over all labels.
        columns: Logits that the softmax covers; the target ``columns.start`` is its first class.
        generator: Random number generator for sampled labels.
        drawn: Pre-drawn uniform numbers, one per sample in order, used instead of ``generator``.
    """

    mode: LabelMode
    columns: slice
    generator: torch.Generator
    drawn: Iterator[float] | None = None

    def picks(self, targets: Tensor) -> Tensor:
        """Return the targets, or one uniform number per label in mode ``sampled``.

        Drawn once per batch, so that a sample computed both ways (fast and slow) has the same label.
        """
        if self.mode != "sampled":
            return targets
        if self.drawn is not None:
            return torch.tensor(list(islice(self.drawn, len(targets))), dtype=torch.float64)
        device = self.generator.device
        draws = torch.rand(targets.shape, generator=self.generator, dtype=torch.float64, device=device)
        return draws.masked_fill_(_without_label(targets).to(device), torch.nan)

    def checked(self, logits: Any, picks: Tensor) -> Tensor:
        """Return the model's output; raise unless it is one finite row of logits per label."""
        if not isinstance(logits, Tensor) or logits.shape[:-1] != picks.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            shape = ", ".join(map(str, picks.shape))
            raise CofimaError(f"the model must return logits of shape ({shape}, classes), got {got}")
        if self.mode == "exact" and logits.ndim > 2:
            raise CofimaError("labels = 'exact': not for models with several labels a sample; take 'sampled'")
        if not logits.isfinite().all():
            raise CofimaError("the logits are not finite; check the weights and the images")
        return logits

    def directions(self, logits: Tensor, picks: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yield each gradient at the logits, and whether more will follow.

        Computed in double precision: for a confident prediction, 1 - p loses every digit in single.
        """
        start, stop, _ = self.columns.indices(logits.shape[-1])
        if stop <= start:
            raise CofimaError(f"columns {start}:{stop} select none of {logits.shape[-1]} logits")
        p = logits[..., start:stop].double().softmax(-1)
        rows = _factor(p) if self.mode == "exact" else [self._gradient(p, picks.to(p.device), start)]
        for k, row in enumerate(rows):
            full = torch.zeros_like(logits)
            full[..., start:stop] = row
            yield full, k < len(rows) - 1

    def _gradient(self, p: Tensor, picks: Tensor, start: int) -> Tensor:
        """Return the gradient of log p(y|x), 0 at tokens without a label."""
        classes, unlabeled = p.shape[-1], _without_label(picks)
        if self.mode == "sampled":
            local = (p.cumsum(-1) <= picks[..., None]).sum(-1).clamp(max=classes - 1)
        else:
            local = (picks.long() - start).masked_fill_(unlabeled, 0)
            wrong = sorted(set(picks[(local < 0) | (local >= classes)].tolist()))
            if wrong:
                span = f"{start} to {start + classes - 1}"
                raise problems("targets", [f"{t}: not a class; the logits cover {span}" for t in wrong[:10]])
        chosen = torch.nn.functional.one_hot(local, classes).to(p)
        return (chosen - p).masked_fill_(unlabeled[..., None], 0)


def _without_label(picks: Tensor) -> Tensor:
    """Return the mask of tokens without a label; a sample with a single label always has one."""
    if picks.ndim == 1:
        return torch.zeros_like(picks, dtype=torch.bool)
    return picks.isnan() if picks.is_floating_point() else picks == IGNORED


def _factor(p: Tensor) -> list[Tensor]:
    """Return the Cholesky columns of the covariance diag(p) - p p^T of a label.

    The expectation over labels is sum_y p_y (J^T (e_y - p))^2, that is diag(J^T C J) with C the covariance:
    the sum of squared gradients along the columns of any L with L L^T = C. C has rank classes - 1, so its
    Cholesky factor saves one backward pass, and its columns are known in closed form.
    """
    tail = p.flip(1).cumsum(1).flip(1)
    columns = []
    for k in range(p.shape[1] - 1):
        here, rest = tail[:, k], tail[:, k + 1]
        column = torch.zeros_like(p)
        column[:, k] = (p[:, k] * (rest / here)).sqrt()
        column[:, k + 1 :] = -p[:, k + 1 :] / rest[:, None] * (p[:, k] * (rest / here)).sqrt()[:, None]
        columns.append(column.nan_to_num(0.0))  # 0/0 where no probability is left
    return columns
