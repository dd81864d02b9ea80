"""The request for a merge, checked before any work."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path

from cofima.core.errors import did_you_mean
from cofima.store.model_folder import CURRENT, is_empty


class MergeMethod(StrEnum):
    """Rule by which weights are merged."""

    average = auto()
    fisher = auto()
    wise_ft = auto()
    task_arithmetic = auto()
    ties = auto()


AVERAGE, FISHER, WISE_FT, TASK_ARITHMETIC, TIES = MergeMethod
LAM = {AVERAGE: 0.4, FISHER: 0.4, WISE_FT: 0.5, TASK_ARITHMETIC: 0.4, TIES: 1.0}
DENSITY = 0.2


@dataclass(frozen=True)
class MergeSettings:
    """Rule of a merge, with every number settled.

    Attributes:
        method: One of :class:`MergeMethod`.
        lam: The share of the second of two models, or the scale of task vectors; None where weights decide.
        weights: Weight of each model.
        density: The share of each task vector that TIES keeps.
    """

    method: MergeMethod
    lam: float | None
    weights: tuple[float, ...]
    density: float

    def __str__(self) -> str:
        said = [f"{self.method}"]
        said += [f"lam {self.lam:g}"] if self.lam is not None else []
        said += [f"density {self.density:g}"] if self.method is TIES else []
        if self.lam is None or (self.method is TIES and len(set(self.weights)) > 1):
            said += ["weights " + " ".join(f"{weight:g}" for weight in self.weights)]
        return ", ".join(said)


@dataclass(frozen=True)
class MergeRequest:
    """The request; None means not given."""

    method: str
    models: Sequence[Path]
    lam: float | None = None
    weights: Sequence[float] | None = None
    fishers: Sequence[Path] | None = None
    base: Path | None = None
    density: float | None = None

    def problems(self) -> list[str]:
        """Return every problem of the request itself, without looking at files."""
        if self.method not in list(MergeMethod):
            known = [str(method) for method in MergeMethod]
            return [f"method = {self.method}: unknown{did_you_mean(str(self.method), known)}"]
        return [*self._models(), *self._numbers(), *self._files()]

    def settings(self) -> MergeSettings:
        """Return the request with defaults filled in, once there are no problems."""
        method = MergeMethod(self.method)
        vectors = method in (TASK_ARITHMETIC, TIES)
        by_weights = method is not TIES and self.weights is not None
        by_weights |= not vectors and method is not WISE_FT and len(self.models) > 2
        lam = LAM[method] if self.lam is None else self.lam
        fill = lam if method is TASK_ARITHMETIC else 1.0
        weights = tuple(self.weights) if self.weights is not None else (fill,) * len(self.models)
        density = DENSITY if self.density is None else self.density
        return MergeSettings(method, None if by_weights else lam, weights, density)

    def _models(self) -> list[str]:
        count, based = len(self.models), self.base is not None
        if self.method in (AVERAGE, FISHER) and count < 2:
            return [f"method = {self.method}: needs two models or more, got {count}"]
        if self.method == WISE_FT and (count, based) not in ((2, False), (1, True)):
            given = f"{count} model{'s' if count != 1 else ''} with{'' if based else 'out'} a base"
            return [
                f"method = wise_ft: needs the base and one model, in this order or with --base; got {given}"
            ]
        return [f"method = {self.method}: needs a model"] if count < 1 else []

    def _numbers(self) -> list[str]:
        wrong, free = [], self.method in (TASK_ARITHMETIC, TIES)
        if self.lam is not None:
            if not math.isfinite(self.lam) or not (free or 0 <= self.lam <= 1):
                wrong.append(f"lam = {self.lam}: must {'be finite' if free else 'lie between 0 and 1'}")
            if self.weights is not None and self.method != TIES:
                wrong.append("lam and weights: give one of them")
            elif len(self.models) > 2 and not free:
                wrong.append(f"lam = {self.lam}: is for two models; give weights, one a model")
        if self.weights is not None:
            wrong += self._weights(self.weights)
        if self.density is not None and self.method != TIES:
            wrong.append(f"density = {self.density}: only for method ties")
        elif self.density is not None and not 0 < self.density <= 1:
            wrong.append(f"density = {self.density}: must be above 0 and at most 1")
        return wrong

    def _weights(self, weights: Sequence[float]) -> list[str]:
        shown = " ".join(f"{weight:g}" for weight in weights)
        if self.method == WISE_FT:
            return ["weights: not for method wise_ft; its share is lam"]
        if len(weights) != len(self.models):
            return [f"weights = {shown}: {len(weights)} for {len(self.models)} models; give one a model"]
        if not all(math.isfinite(weight) for weight in weights):
            return [f"weights = {shown}: must be finite"]
        if self.method != TASK_ARITHMETIC and (min(weights) < 0 or sum(weights) <= 0):
            return [f"weights = {shown}: must not be negative, nor all 0"]
        return []

    def _files(self) -> list[str]:
        wrong, given = [], len(self.fishers or ())
        if self.method == FISHER and given != len(self.models):
            wrong.append(
                f"method = fisher: needs --fisher with one file a model, in their order; got {given} for "
                f"{len(self.models)}. cofima fisher MODEL IMAGES -o FILE makes one"
            )
        if self.method != FISHER and self.fishers:
            wrong.append("fisher: only for method fisher")
        if self.method in (TASK_ARITHMETIC, TIES) and self.base is None:
            wrong.append(f"method = {self.method}: needs --base, the weights that all models started from")
        if self.method in (AVERAGE, FISHER) and self.base is not None:
            wrong.append(f"base: not for method {self.method}; name it among the models, or take wise_ft")
        return wrong


def output_problems(out: Path, inputs: Iterable[Path], folder: bool, force: bool) -> list[str]:
    """Return the reasons not to write to ``out``: a file, or a model folder."""
    real = out.resolve()
    for path in inputs:
        other = path.resolve()
        if real == other or real in other.parents or (other.is_dir() and other in real.parents):
            return [f"out = {out}: would overwrite {path}, which is read; give another place"]
    there = next(parent for parent in real.parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return [f"out = {out}: {there} is not a folder that may be written to"]
    if not folder and out.suffix != ".safetensors":
        return [f"out = {out}: files are merged into a file; its name must end in .safetensors"]
    if not out.exists() or (folder and out.is_dir() and is_empty(out)):
        return []
    if folder != out.is_dir() or (folder and not (out / CURRENT).is_file()):
        return [
            f"out = {out}: is there, and is not a {'model folder' if folder else 'file'}; it is left alone"
        ]
    return [] if force else [f"out = {out}: exists; give another place, or --force to replace it"]
