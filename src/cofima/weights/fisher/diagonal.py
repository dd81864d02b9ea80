"""Diagonal Fisher information of any classifier: the public function, and the sum over batches.

There are two implementations. The fast one (:mod:`per_sample`, :mod:`rules`, :mod:`kernels`) computes all
squared per-sample gradients in one backward pass per batch, with a rule for each torch function. The slow
one (:mod:`reference`) runs one pass per sample and needs no rules. :mod:`verify` compares the two on two
samples of the actual model, once per process, and chooses one for each parameter. A first batch of a few
samples takes the slow one: verifying the fast one would cost more.
"""

from collections.abc import Iterable, Iterator, Set
from copy import deepcopy
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cofima.core.errors import CofimaError, did_you_mean, problems
from cofima.weights.fisher.inputs import Inputs, place, take, tensors
from cofima.weights.fisher.labels import LabelMode, Labels
from cofima.weights.fisher.per_sample import add_batch
from cofima.weights.fisher.preserve_state import preserved_state
from cofima.weights.fisher.reference import add_each, add_mean
from cofima.weights.fisher.verify import verified, zeros_for
from cofima.weights.ops import Weights

LabeledBatches = Iterable[tuple[Inputs, Tensor]]
Estimator = Literal["sample", "batch"]

FEW = 8
"""A first batch of up to so many samples is computed one by one, whether or not the model was verified."""

_HALF = (torch.float16, torch.bfloat16)


def diagonal_fisher(
    model: nn.Module,
    batches: LabeledBatches,
    labels: LabelMode = "data",
    estimator: Estimator = "sample",
    *,
    columns: slice | None = None,
    training: bool = False,
    generator: torch.Generator | None = None,
    drawn: Iterator[float] | None = None,
) -> Weights:
    r"""Return the diagonal Fisher information of every parameter of ``model``.

    .. math:: F = \frac1N \sum_{i=1}^N \mathbb E_y \left(\nabla_\theta \log p(y \mid x_i)\right)^2

    Per-sample gradients are squared in eval mode and at least single precision. One backward pass serves a
    whole batch, so the cost is about that of one training epoch. The result does not depend on how samples
    are batched. Parameters that the fast rules do not cover (or that the model also uses elsewhere) are
    detected and computed one sample at a time. The model, its gradients, hooks and flags, and torch's
    random number generators are left unchanged.

    Args:
        model: Any module that maps images to logits, one row per image; or one row per token, in which case
            all labels of an image together form one sample.
        batches: Pairs of images and integer class ids. Images may also be mappings or sequences of tensors,
            as the model accepts them; class ids may be one per token, with -100 for tokens without a label.
        labels: ``data`` uses the given class, ``sampled`` draws one from the model for each sample,
            ``exact`` takes the expectation over all C classes, in C - 1 backward passes.
        estimator: ``sample``, or ``batch``: the square of each batch's mean gradient, averaged over batches,
            as in the code released with CoFiMA (Marouf et al., ECCV 2024). That form is biased: over random
            batches of B samples its mean is about F/B + (1 - 1/B) g^2, with g the mean gradient, so that
            near a minimum it is B times too small, and a short last batch counts as much as a full one.
        columns: Logits that the softmax covers; class ids stay global.
        training: Keep dropout and batch statistics on, as the released code does; only with ``batch``.
        generator: Random number generator for sampled labels; by default a fresh one with seed 0.
        drawn: Pre-drawn uniform numbers that determine the sampled labels, one per sample.

    Returns:
        The Fisher information of each parameter, under its name in ``model.named_parameters()``, with its
        shape and in at least single precision.

    Raises:
        CofimaError: An unknown choice, no batches, a target without a logit, or gradients not finite.

    Example::

        loader = DataLoader(train_set, batch_size=64)
        fisher = diagonal_fisher(model, loader)
        fisher["head.weight"]  # same shape as model.head.weight, non-negative
    """
    _check_choices(labels, estimator, columns, training)
    generator = generator or torch.Generator().manual_seed(0)
    chosen = Labels(labels, columns or slice(None), generator, drawn)
    work = _at_least_single(model)
    with preserved_state(work, training):
        fisher = _Sums(work, chosen, estimator).over(batches)
    # squares are non-negative and cannot cancel: their sum is finite if and only if each of them is
    broken = [name for name, values in fisher.items() if not values.sum(dtype=torch.float64).isfinite()]
    if broken:
        raise problems(
            "the Fisher information", [f"{name}: not finite, its gradients overflow" for name in broken]
        )
    return fisher


class _Sums:
    """Running sums of squared gradients, and the parameters of the fast and the slow implementation."""

    def __init__(self, model: nn.Module, labels: Labels, estimator: Estimator) -> None:
        self.model, self.labels, self.estimator = model, labels, estimator
        self.totals = {name: zeros_for(p) for name, p in model.named_parameters()}
        self.fast: Set[str] | None = None  # unknown until verified on two samples
        self.slow: Set[str] = set(self.totals)
        self.count = 0

    def over(self, batches: LabeledBatches) -> Weights:
        for index, batch in enumerate(batches):
            try:
                self.count += self._add(*self._ready(batch))
            except CofimaError as error:
                raise CofimaError(f"batch {index}: {error}") from None
        if self.count == 0:
            raise CofimaError("no samples: the Fisher information needs at least one batch")
        return {name: total.div_(self.count) for name, total in self.totals.items()}

    def _ready(self, batch: Any) -> tuple[Inputs, Tensor]:
        pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not pair or not isinstance(batch[1], Tensor) or not (found := [*tensors(batch[0])]):
            raise CofimaError("expected a pair of tensors: images and their class ids")
        images, targets = batch
        if (
            not targets.ndim
            or targets.is_floating_point()
            or targets.shape[:1] not in {t.shape[:1] for t in found}
        ):
            got = f"shapes {tuple(found[0].shape)} and {tuple(targets.shape)}, {targets.dtype}"
            raise CofimaError(f"expected one integer class id for each image, got {got}")
        # cast images to the precision of the model, which may be a float32 copy of a half-precision one
        first = next((p for p in self.model.parameters() if p.is_floating_point()), found[0])
        dtype = first.dtype if first.is_floating_point() else None
        return place(images, first.device, dtype), self.labels.picks(targets)

    def _add(self, images: Inputs, picks: Tensor) -> int:
        """Add one batch; return its weight in the mean."""
        if len(picks) == 0:
            return 0
        if self.estimator == "batch":
            add_mean(self.model, set(self.totals), images, picks, self.labels, self.totals)
            return 1
        # The choice depends on the batches alone: whether this process has verified the model before must not
        # change a bit of the result.
        few = len(picks) <= (FEW if self.count == 0 else 1)
        if self.fast is None and not few:
            # Squares from verification are discarded for the same reason.
            pair = (take(images, slice(2), len(picks)), picks[:2])
            self.fast, self.slow = verified(self.model, *pair, self.labels)
        self._add_samples(images, picks)
        return len(picks)

    def _add_samples(self, images: Inputs, picks: Tensor) -> None:
        slow: Set[str] = set(self.totals)
        if self.fast and len(picks) > 1:  # the fast implementation gains nothing on a single sample
            _, left = add_batch(self.model, self.fast, images, picks, self.labels, self.totals)
            slow = self.slow | left  # this batch may use parameters unlike the two verified samples
        if slow:
            add_each(self.model, slow, images, picks, self.labels, self.totals)


def _at_least_single(model: nn.Module) -> nn.Module:
    """Return the model itself, or a float32 copy if it has half-precision weights."""
    if not any(p.dtype in _HALF for p in model.parameters()):
        return model
    try:
        copy: nn.Module = deepcopy(model)
        copy._apply(lambda t: t.float() if t.dtype in _HALF else t)  # type: ignore[no-untyped-call]
        return copy
    except Exception as error:
        raise CofimaError(f"this half-precision model cannot be copied to float32: {error}") from error


def _check_choices(labels: str, estimator: str, columns: slice | None, training: bool) -> None:
    wrong = []
    if labels not in get_args(LabelMode):
        wrong.append(f"labels = {labels!r}: unknown{did_you_mean(str(labels), get_args(LabelMode))}")
    if estimator not in get_args(Estimator):
        wrong.append(f"estimator = {estimator!r}: unknown{did_you_mean(str(estimator), get_args(Estimator))}")
    if estimator == "batch" and labels == "exact":
        wrong.append("labels = 'exact': not defined for estimator 'batch'; choose 'data' or 'sampled'")
    if training and estimator != "batch":
        wrong.append("training = True: only for estimator 'batch'; samples would influence each other")
    if columns is not None and columns.step not in (None, 1):
        wrong.append(f"columns = {columns}: must be consecutive")
    if wrong:
        raise problems("diagonal_fisher", wrong)
