"""The request for a merge, validated before any work."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import Literal

from cofima.core.errors import did_you_mean


class MergeMethod(StrEnum):
    """Merge methods."""

    average = auto()
    fisher = auto()
    wise_ft = auto()
    task_arithmetic = auto()
    ties = auto()
    magmax = auto()
    model_stock = auto()
    breadcrumbs = auto()
    dare = auto()


AVERAGE, FISHER, WISE_FT, TASK_ARITHMETIC, TIES, MAGMAX, MODEL_STOCK, BREADCRUMBS, DARE = MergeMethod


@dataclass(frozen=True)
class Rule:
    """Parameters of a merge method with their defaults; None if it has no such parameter.

    Attributes:
        lam: Share of the second of two models, or scale of the task vectors.
        models: Minimum number of models.
        vectors: True if it merges task vectors, and so needs the base.
        weights: Meaning of the weights: the ``share`` of each model, the ``scale`` of its task vector instead
            of ``lam``, a ``vote`` in addition to ``lam``, or none.
        density: Share of each task vector that is kept.
        outliers: Share of the largest elements that is dropped first.
        seeded: True if elements are dropped at random.
    """

    lam: float | None
    models: int = 1
    vectors: bool = False
    weights: Literal["share", "scale", "vote", ""] = ""
    density: float | None = None
    outliers: float | None = None
    seeded: bool = False


RULES = {
    AVERAGE: Rule(0.5, models=2, weights="share"),
    FISHER: Rule(0.5, models=2, weights="share"),
    WISE_FT: Rule(0.5),
    TASK_ARITHMETIC: Rule(0.4, vectors=True, weights="scale"),
    TIES: Rule(1.0, vectors=True, weights="vote", density=0.2),
    MAGMAX: Rule(0.5, vectors=True),
    MODEL_STOCK: Rule(None, models=2, vectors=True),
    BREADCRUMBS: Rule(0.2, vectors=True, weights="scale", density=0.15, outliers=0.006),
    DARE: Rule(0.4, vectors=True, weights="scale", density=0.1, seeded=True),
}


@dataclass(frozen=True)
class MergeSettings:
    """Settings of a merge, with all defaults filled in.

    Attributes:
        method: The merge method.
        lam: Share of the second of two models, or scale of the task vectors; None if ``weights`` are used
            instead, or the method has none.
        weights: Weight of each model.
        density: Share of each task vector that is kept.
        outliers: Share of the largest elements of each tensor's task vector that is dropped.
        seed: Random seed of the elements that are dropped.
    """

    method: MergeMethod
    lam: float | None
    weights: tuple[float, ...]
    density: float = 1.0
    outliers: float = 0.0
    seed: int = 0

    @property
    def rule(self) -> Rule:
        """Parameters of the merge method."""
        return RULES[self.method]

    def words(self) -> list[str]:
        """Return the command-line options of ``cofima merge`` for these settings."""
        rule, said = self.rule, ["--method", str(self.method)]
        said += ["--lam", f"{self.lam:g}"] if self.lam is not None else []
        said += ["--density", f"{self.density:g}"] if rule.density is not None else []
        said += ["--outliers", f"{self.outliers:g}"] if rule.outliers is not None else []
        said += ["--seed", str(self.seed)] if rule.seeded else []
        by_weights = rule.weights == "vote" or (rule.weights and self.lam is None)
        return said + (["--weights", *(f"{weight:g}" for weight in self.weights)] if by_weights else [])

    def __str__(self) -> str:
        rule, said = self.rule, [f"{self.method}"]
        said += [f"lam {self.lam:g}"] if self.lam is not None else []
        said += [f"density {self.density:g}"] if rule.density is not None else []
        said += [f"outliers {self.outliers:g}"] if rule.outliers is not None else []
        said += [f"seed {self.seed}"] if rule.seeded else []
        if rule.weights and (self.lam is None or (rule.weights == "vote" and len(set(self.weights)) > 1)):
            said += ["weights " + " ".join(f"{weight:g}" for weight in self.weights)]
        return ", ".join(said)


@dataclass(frozen=True)
class MergeRequest:
    """The user's request; None means not given."""

    method: str
    models: Sequence[Path]
    lam: float | None = None
    weights: Sequence[float] | None = None
    fishers: Sequence[Path] | None = None
    base: Path | None = None
    density: float | None = None
    outliers: float | None = None
    seed: int | None = None
    skip: Sequence[str] = ()
    classes: Sequence[Path] | None = None
    head: str | None = None

    @property
    def rule(self) -> Rule:
        """Parameters of the merge method, which must exist."""
        return RULES[MergeMethod(self.method)]

    def problems(self) -> list[str]:
        """Return all problems of the request itself, without looking at files."""
        if self.method not in list(MergeMethod):
            known = [str(method) for method in MergeMethod]
            return [f"method = {self.method}: unknown{did_you_mean(str(self.method), known)}"]
        return [*self._models(), *self._numbers(), *self._files()]

    def settings(self) -> MergeSettings:
        """Return the settings, with defaults filled in; call :meth:`problems` first."""
        rule, several = self.rule, len(self.models) > 2
        by_weights = rule.weights in ("share", "scale") and self.weights is not None
        by_weights |= rule.weights == "share" and several
        lam = rule.lam if self.lam is None else self.lam
        fill = lam if rule.weights == "scale" and lam is not None else 1.0
        weights = tuple(self.weights) if self.weights is not None else (fill,) * len(self.models)
        return MergeSettings(
            MergeMethod(self.method),
            None if by_weights else lam,
            weights,
            (rule.density or 1.0) if self.density is None else self.density,
            (rule.outliers or 0.0) if self.outliers is None else self.outliers,
            self.seed or 0,
        )

    def _models(self) -> list[str]:
        count, based = len(self.models), self.base is not None
        if self.rule.models == 2 and count < 2:
            return [f"method = {self.method}: needs two models or more, got {count}"]
        if self.method == WISE_FT and (count, based) not in ((2, False), (1, True)):
            given = f"{count} model{'s' if count != 1 else ''} with{'' if based else 'out'} a base"
            return [
                f"method = wise_ft: needs the base and one model, in this order or with --base; got {given}"
            ]
        return [f"method = {self.method}: needs a model"] if count < 1 else []

    def _numbers(self) -> list[str]:
        wrong, rule = [], self.rule
        if self.lam is not None:
            free = rule.vectors
            if rule.lam is None:
                wrong.append(f"lam = {self.lam}: not for method {self.method}, which finds its own share")
            elif not math.isfinite(self.lam) or not (free or 0 <= self.lam <= 1):
                wrong.append(f"lam = {self.lam}: must {'be finite' if free else 'lie between 0 and 1'}")
            if self.weights is not None and rule.weights in ("share", "scale"):
                wrong.append("lam and weights: give one of them")
            elif len(self.models) > 2 and not free:
                wrong.append(f"lam = {self.lam}: is for two models; give weights, one a model")
        if self.weights is not None:
            wrong += self._weights(self.weights)
        return [*wrong, *self._dropped()]

    def _dropped(self) -> list[str]:
        """Return the problems of density, outliers and seed."""
        wrong, rule = [], self.rule
        if self.density is not None and rule.density is None:
            wrong.append(f"density = {self.density}: only for method {_those('density')}")
        elif self.density is not None and not 0 < self.density <= 1:
            wrong.append(f"density = {self.density}: must be above 0 and at most 1")
        if self.outliers is not None and rule.outliers is None:
            wrong.append(f"outliers = {self.outliers}: only for method {_those('outliers')}")
        elif self.outliers is not None and not 0 <= self.outliers < 1:
            wrong.append(f"outliers = {self.outliers}: must be at least 0 and below 1")
        if self.seed is not None and not rule.seeded:
            wrong.append(f"seed = {self.seed}: only for method {_those('seeded')}")
        if not wrong and rule.outliers is not None:
            density = rule.density if self.density is None else self.density
            outliers = rule.outliers if self.outliers is None else self.outliers
            if density is not None and density + outliers > 1:
                wrong.append(f"density = {density} and outliers = {outliers}: are more than the whole vector")
        return wrong

    def _weights(self, weights: Sequence[float]) -> list[str]:
        shown = " ".join(f"{weight:g}" for weight in weights)
        if not self.rule.weights:
            why = "; its share is lam" if self.method == WISE_FT else ", where all models count the same"
            return [f"weights: not for method {self.method}{why}"]
        if len(weights) != len(self.models):
            return [f"weights = {shown}: {len(weights)} for {len(self.models)} models; give one a model"]
        if not all(math.isfinite(weight) for weight in weights):
            return [f"weights = {shown}: must be finite"]
        if self.rule.weights != "scale" and (min(weights) < 0 or sum(weights) <= 0):
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
        if self.rule.vectors and self.base is None:
            wrong.append(f"method = {self.method}: needs --base, the weights that all models started from")
        if self.method in (AVERAGE, FISHER) and self.base is not None:
            wrong.append(f"base: not for method {self.method}; name it among the models, or take wise_ft")
        return [*wrong, *self._heads()]

    def _heads(self) -> list[str]:
        """Return the problems of the options for heads of plain files."""
        told = {"skip": self.skip, "classes": self.classes, "head": self.head}
        folders = [path for path in self.models if path.is_dir()]
        if folders and any(told.values()):
            which = ", ".join(key for key, value in told.items() if value)
            return [f"{which}: for files only; {folders[0]} is a model folder, which names its classes"]
        if self.classes is not None and len(self.classes) != len(self.models):
            return [f"classes: {len(self.classes)} lists for {len(self.models)} models; give one a model"]
        return ["head: only with classes"] if self.head and not self.classes else []


def _those(parameter: str) -> str:
    """Return the names of the methods that have a parameter, as text."""
    return " and ".join(method for method, rule in RULES.items() if getattr(rule, parameter))


def output_problems(out: Path, inputs: Iterable[Path], folder: bool, force: bool) -> list[str]:
    """Return the reasons why ``out``, a file or a model folder, cannot be written."""
    from cofima.store.generation import CURRENT  # not at the top: the command line imports this module
    from cofima.store.model_folder import is_empty

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
