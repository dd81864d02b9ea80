r"""Continual averaging in your own training loop: CoMA and CoFiMA for any ``nn.Module``.

Marouf et al., "Weighted Ensemble Models Are Strong Continual Learners", ECCV 2024,
https://arxiv.org/abs/2312.08977. The weights :math:`\theta^*_{t-1}` before a task and :math:`\theta_t` after
its training are replaced in place by their average, plain (Eq. 3) or Fisher-weighted (Eq. 7).
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cofima.core import distributed
from cofima.core.errors import CofimaError, did_you_mean
from cofima.integrations.batches import Forward, Logits
from cofima.integrations.heads import ClassHeads, HeadKind
from cofima.methods.components.alignment import AlignOptions
from cofima.methods.components.averaging import refreshed
from cofima.methods.components.closed_form import ClosedFormOptions
from cofima.methods.components.fisher import AverageFisherOptions, add_fisher, scaled
from cofima.training.loop import batchnorm_layers
from cofima.weights import Weights, auto_lambda, average, diagonal_fisher, equal_step, fisher_average
from cofima.weights import weight_distance as distance
from cofima.weights.average import check_lam
from cofima.weights.fisher.labels import IGNORED, LabelMode
from cofima.weights.ops import first_rows

FORMAT = 1
HISTORIES = ("last", "accumulate")
WEIGHTS = ("classes", "samples", "tasks")


@dataclass(frozen=True)
class AverageReport:
    """Result of one task.

    Attributes:
        task: Number of the task, starting at 1.
        lam: Share of the trained weights; 1 for the first task, after which nothing is averaged.
        trained_distance: Euclidean distance of the trained parameters from those before the task.
        distance: Euclidean distance of the averaged parameters from those before the task.
        samples: Number of samples that the Fisher information was measured on; 0 if it is not needed.
        classes: Number of different labels among them.
        seconds: Time of the merge.
    """

    task: int
    lam: float
    trained_distance: float
    distance: float
    samples: int
    classes: int
    seconds: float


@dataclass
class _Seen:
    """Number of samples and set of labels seen in a loader."""

    samples: int = 0
    labels: set[int] = field(default_factory=set)


class ContinualAverage:
    """Average a model's weights before and after each task, in place.

    After the first task nothing is averaged, as the weights before it belong to no task. New weights, and new
    rows of a tensor (``fc.weight`` from 10 to 20 classes), keep their trained values, whether the model grew
    before or after :meth:`begin`. With several processes, each provides the samples of its own loader, and
    all end with the same weights.

    Args:
        model: Any module; it may be wrapped (DDP, DataParallel) or compiled.
        lam: Share of the trained weights; 0 keeps the old ones, 1 the trained ones; ``auto`` computes it.
        fisher: Labels of the Fisher information (``data``, ``sampled`` or ``exact``), or all of its
            options; None for a plain average.
        fisher_history: Use the Fisher information of the ``last`` task, or ``accumulate`` it over tasks;
            ``lam="auto"`` always accumulates.
        weight: Weight of a task in the accumulated sum.
        fallback: Share to use where ``lam="auto"`` is undefined for a plain average.
        forward: Function of model and batch that returns logits and labels, for batches that are neither
            ``(inputs, labels)`` nor mappings with ``labels``. Logits may have token dimensions; labels of
            -100 are ignored.
        heads: Regular expression for the names of tensors that may gain rows; by default all.

    Example::

        from cofima import ContinualAverage

        merger = ContinualAverage(model, lam=0.4)
        for loader in tasks:  # DataLoaders
            with merger.task(loader):
                train(model, loader)
    """

    def __init__(
        self,
        model: nn.Module,
        lam: float | Literal["auto"] = 0.4,
        fisher: LabelMode | AverageFisherOptions | None = "data",
        *,
        fisher_history: Literal["last", "accumulate"] = "last",
        weight: Literal["classes", "samples", "tasks"] = "classes",
        fallback: float = 0.4,
        forward: Forward | None = None,
        heads: str | None = None,
    ) -> None:
        check_lam(fallback if lam == "auto" else lam)
        for name, value, known in (
            ("fisher_history", fisher_history, HISTORIES),
            ("weight", weight, WEIGHTS),
        ):
            if value not in known:
                raise CofimaError(f"{name} = {value!r}: unknown{did_you_mean(value, known)}")
        self.model = _unwrapped(model)
        self.lam, self.fallback, self.weight = lam, fallback, weight
        self.by_fisher = fisher is not None
        self.options = _options(fisher, lam)
        self.sums = fisher_history == "accumulate" or lam == "auto"
        self.heads = heads
        self.logits = Logits(self.model, forward)
        self.history: list[AverageReport] = []
        self.shapes: dict[str, list[int]] = {}
        """Shapes of all weights at the end of the previous task; rows added since are not averaged."""
        self.before: Weights | None = None
        """Weights before the current task; None between tasks."""
        self.old_fisher: Weights = {}
        self.classes = ClassHeads()
        self._refuse_partial_weights()

    @property
    def tasks(self) -> int:
        """Number of finished tasks."""
        return len(self.history)

    @property
    def uses_fisher(self) -> bool:
        """True if the average or ``lam`` needs Fisher information."""
        return self.by_fisher or self.lam == "auto"

    @contextmanager
    def task(self, loader: Iterable[Any] | None = None, *, last: bool = False) -> Iterator[None]:
        """Begin a task, and end it after the block; after an error, the weights are not averaged.

        The arguments are those of :meth:`end`.
        """
        self.begin()
        try:
            yield
        except BaseException:
            self.before = None
            raise
        self.end(loader, last=last)

    def begin(self) -> None:
        """Store the weights before a task; call it before training."""
        if self.before is not None:
            raise CofimaError(f"task {self.tasks + 1} has begun already: end() ends it")
        _require_fisher(self.uses_fisher, self.history, self.old_fisher)
        now = self._weights()
        kept = self._kept(now, self.shapes) if self.history else now
        self.before = {key: value.detach().clone() for key, value in kept.items()}

    def end(self, loader: Iterable[Any] | None = None, *, last: bool = False) -> AverageReport:
        """Average the weights before the task with the current ones, in place; call it after training.

        Args:
            loader: Batches of the task's training images, read up to three times: for Fisher information,
                and for the statistics of batch normalization. None if neither is needed.
            last: True if no task follows: skip the Fisher information that only the next one needs.

        Returns:
            The share, distances and time of the merge.
        """
        if self.before is None:
            raise CofimaError("no task has begun: call begin() before the training")
        self._require_loader(loader)
        before, now, start = self.before, self._weights(), time.perf_counter()
        known = self._kept(now, _shapes(before))
        parameters = {name for name, _ in self.model.named_parameters()}
        old = {key: value for key, value in before.items() if key in parameters}
        trained = distance(old, first_rows(now, old))
        with _kept_modes(self.model):
            fisher, seen = self._measure(loader) if self.uses_fisher else ({}, _Seen())
            lam = 1.0
            if self.history:  # the weights before the first task belong to no task
                lam = self._share(before, known, fisher)
                self._average(before, known, lam, fisher, loader)
            if last:
                self.old_fisher = {}
            else:
                self._keep_fisher(fisher, loader)
        self.shapes = _shapes(now)
        self.before = None
        moved = distance(old, first_rows(now, old))
        seconds = time.perf_counter() - start
        report = AverageReport(self.tasks + 1, lam, trained, moved, seen.samples, len(seen.labels), seconds)
        self.history.append(report)
        return report

    def align(
        self,
        head: nn.Linear,
        loader: Iterable[Any],
        kind: HeadKind = "sgd",
        options: AlignOptions | ClosedFormOptions | None = None,
    ) -> nn.Linear:
        """Return a head for all classes so far; the model, including its own head, does not change.

        Call it after each :meth:`end`: the features of the task's classes are summarized as Gaussians, which
        are part of :meth:`state_dict`. Training continues with the model's own head.

        Args:
            head: The model's last layer, with one row per class.
            loader: Batches of the task's training images.
            kind: ``sgd`` aligns a copy on features sampled from all Gaussians, as SLCA does; ``lda`` is the
                closed-form head of a linear discriminant analysis, in which unseen classes are never
                predicted.
            options: Options of this kind.

        Returns:
            A new linear layer of the same shape, with a bias.
        """
        if self.before is not None:
            raise CofimaError("the task has not ended: align() comes after end()")
        with _kept_modes(self.model):
            return self.classes.align(self.logits, head, loader, kind, options)

    def _share(self, before: Weights, known: Weights, fisher: Weights) -> float:
        """Return ``lam``.

        With ``auto``, a Fisher-weighted average takes 0.5, as the accumulated sums already weigh both sides;
        a plain average takes the share of :func:`cofima.auto_lambda`.
        """
        if self.lam != "auto":
            return self.lam
        if self.by_fisher:
            return 0.5
        mine = first_rows(fisher, self.old_fisher)
        return auto_lambda(before, known, self.old_fisher, mine, fallback=self.fallback)

    def _average(
        self, before: Weights, known: Weights, lam: float, fisher: Weights, loader: Iterable[Any] | None
    ) -> None:
        """Overwrite the trained weights by the average, and re-estimate batch normalization."""
        batches = ((batch, None) for batch in self.logits.placed(() if loader is None else loader))
        with refreshed(self.logits, before, known, lam, batches):
            if not self.by_fisher:
                average(before, known, lam, out=known)
            else:
                mine, scale = first_rows(fisher, self.old_fisher), 1.0
                if self.options.share == "equal":
                    scale = equal_step(before, known, self.old_fisher, mine, lam).scale
                fisher_average(before, known, self.old_fisher, mine, lam, scale=scale, out=known)
        if distributed.world_size() > 1:
            for layer in batchnorm_layers(self.model):  # each process has seen only its own samples
                for value in (layer.running_mean, layer.running_var):
                    if value is not None:
                        distributed.all_reduce_sum(value).div_(distributed.world_size())
            distributed.broadcast_weights(self.model)

    def _keep_fisher(self, fisher: Weights, loader: Iterable[Any] | None) -> None:
        """Store the accumulated Fisher information, or that of the weights that the next task starts from."""
        if self.sums:
            self.old_fisher = add_fisher(self.old_fisher, fisher)
        elif not self.history or not self.by_fisher:
            self.old_fisher = fisher
        else:
            self.old_fisher = {}
            fisher.clear()  # frees the memory of two models before the average is measured
            self.old_fisher, _ = self._measure(loader)

    def _measure(self, loader: Iterable[Any] | None) -> tuple[Weights, _Seen]:
        """Return the Fisher information of the current weights, times the task's weight if accumulated."""
        seen = _Seen()
        chance = torch.Generator().manual_seed(self.tasks * distributed.world_size() + distributed.rank())
        pairs = self._pairs(() if loader is None else loader, seen)
        found = diagonal_fisher(self.logits, pairs, self.options.labels, generator=chance)
        fisher = {key.removeprefix("model."): value for key, value in found.items()}
        if distributed.world_size() > 1:
            parts = distributed.all_gather_objects((seen.samples, seen.labels))
            mine = distributed.Shard(0, seen.samples, sum(samples for samples, _ in parts))
            fisher = {key: mine.mean(value) for key, value in fisher.items()}
            seen = _Seen(mine.whole, set().union(*(labels for _, labels in parts)))
        fisher = scaled(fisher, self.options)
        times = {"classes": len(seen.labels), "samples": seen.samples, "tasks": 1}[self.weight]
        return {key: value * times for key, value in fisher.items()} if self.sums else fisher, seen

    def _pairs(self, loader: Iterable[Any], seen: _Seen) -> Iterator[tuple[Any, Tensor]]:
        """Yield batches with their labels, and count samples and labels in ``seen``."""
        for batch in self.logits.placed(loader):
            labels = self.logits.labels(batch)
            seen.samples += len(labels)
            seen.labels |= {label for label in torch.unique(labels).tolist() if label != IGNORED}
            yield batch, labels

    def _weights(self) -> Weights:
        """Return the model's tensors by name; a tensor with two names (tied weights) by the first."""
        self._refuse_partial_weights()
        found: Weights = {}
        places = set()
        for key, value in self.model.state_dict().items():
            if isinstance(value, Tensor) and (place := (value.data_ptr(), value.shape)) not in places:
                found[key] = value
                places |= {place} if value.numel() else set()
        return found

    def _kept(self, now: Weights, shapes: Mapping[str, list[int]]) -> Weights:
        """Return views of the weights with these earlier shapes; raise if more than rows was added."""
        for key, shape in shapes.items():
            found = list(now[key].shape) if key in now else None
            grown = found is not None and found[1:] == shape[1:] and found[:1] > shape[:1]
            if found != shape and not (grown and (self.heads is None or re.search(self.heads, key))):
                gone = "is gone" if found is None else f"has shape {found}"
                which = "" if self.heads is None else f" of '{self.heads}'"
                raise CofimaError(
                    f"'{key}' had shape {shape} and {gone} now: only rows{which} and new weights may be added"
                )
        return {key: now[key][: shape[0]] if shape else now[key] for key, shape in shapes.items()}

    def _refuse_partial_weights(self) -> None:
        """Raise if weights are on the ``meta`` device or sharded over devices."""
        for name, p in self.model.named_parameters():
            if p.is_meta:
                raise CofimaError(f"'{name}' is on the meta device and has no values: load the weights first")
            if any(hasattr(p, mark) for mark in ("device_mesh", "_is_flat_param", "ds_id")):
                raise CofimaError(
                    f"'{name}' is sharded over devices (FSDP, DTensor or ZeRO-3) and an average needs whole "
                    "weights: train with DDP, or average gathered checkpoints with cofima.fisher_average"
                )

    def _require_loader(self, loader: Iterable[Any] | None) -> None:
        """Raise if batches are needed and missing, or can be read only once."""
        if loader is None and (self.uses_fisher or batchnorm_layers(self.model)):
            what = "Fisher information" if self.uses_fisher else "batch normalization"
            raise CofimaError(f"end() needs the task's loader, for the {what}")
        if isinstance(loader, Iterator):
            raise CofimaError(
                "the loader is an iterator that can be read only once; give a DataLoader or a list of batches"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next task, or the rest of this one, needs besides the model."""
        return {
            "format": FORMAT,
            "history": [asdict(report) for report in self.history],
            "shapes": self.shapes,
            "before": self.before,
            "fisher": self.old_fisher,
            "classes": self.classes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; the caller loads the model's own weights."""
        if state.get("format") != FORMAT:
            raise CofimaError(f"this is not the state of a ContinualAverage of format {FORMAT}")
        _require_fisher(self.uses_fisher, state["history"], state["fisher"])
        device = next(self.model.parameters(), torch.empty(0)).device
        self.history = [AverageReport(**row) for row in state["history"]]
        self.shapes = dict(state["shapes"])
        self.classes = ClassHeads.restore(state["classes"])
        before = state["before"]
        self.before = None if before is None else {key: value.to(device) for key, value in before.items()}
        self.old_fisher = {key: value.to(device) for key, value in state["fisher"].items()}


def _require_fisher(needed: bool, history: Sequence[Any], fisher: Weights) -> None:
    """Raise if the next task would lack the Fisher information of earlier tasks."""
    if needed and history and not fisher:
        raise CofimaError(
            "there is no Fisher information of the task before (it ended with fisher=None or last=True), and "
            "the average of the next needs it: take fisher=None, or last=False then"
        )


def _shapes(weights: Weights) -> dict[str, list[int]]:
    return {key: list(value.shape) for key, value in weights.items()}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return _unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _options(
    fisher: LabelMode | AverageFisherOptions | None, lam: float | Literal["auto"]
) -> AverageFisherOptions:
    """Return the options of the Fisher information; raise for those that are not supported here."""
    if isinstance(fisher, str) and fisher not in get_args(LabelMode):
        raise CofimaError(f"fisher = {fisher!r}: unknown{did_you_mean(fisher, get_args(LabelMode))}")
    how = AverageFisherOptions(labels=fisher) if isinstance(fisher, str) else fisher or AverageFisherOptions()
    if how.logits == "local":
        raise CofimaError("logits = local: which logits are the task's own is not known here")
    if how.share == "equal" and lam == "auto":
        raise CofimaError("share = equal: needs a number for lam, the share of the way")
    return how


@contextmanager
def _kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
