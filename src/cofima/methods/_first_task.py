"""What decides the state after the first task, for the methods that say so: a grid learns it once.

Before the second task nothing is merged, aligned, distilled or held, so most options have no say. Two
methods that return the same end a first task with the same bits, as tests/methods/test_first_task.py
finds by learning it both ways.
"""

from typing import Any

from cofima.methods.base import Method
from cofima.methods.cofima import CoFiMA
from cofima.methods.coma import CoMA
from cofima.methods.ema import EMA
from cofima.methods.ewc import EWC
from cofima.methods.lwf import LwF
from cofima.methods.slca import SLCA
from cofima.methods.weight_ensemble import WeightEnsemble
from cofima.methods.wise_ft import WiSEFT

SLOW = ("slow learner with Gaussians",)


def first_task(method: Method) -> tuple[Any, ...] | None:
    """Return all that the first task depends on beside what every method shares; None if that is not known.

    Classes are compared exactly: what a class derived from one of these adds is not known here.
    """
    said = _decided_by(method)
    return (*said, method.align.shrink) if said and isinstance(method, SLCA) else said


def _decided_by(method: Method) -> tuple[Any, ...] | None:
    """Return what a method depends on, beside how it remembers classes as Gaussians."""
    kind = type(method)
    if kind is SLCA:
        return SLOW
    if isinstance(method, CoMA) and kind in (CoMA, CoFiMA):
        return _averaging(method)
    if isinstance(method, EMA) and kind is EMA:
        return ("ema", method.share)
    if isinstance(method, WiSEFT) and kind is WiSEFT:  # it may merge after the first task too
        return ("wise_ft", method.lam if method.merge_first else None)
    if isinstance(method, WeightEnsemble) and kind is WeightEnsemble:  # the mean of one is that one
        return ("weight_ensemble",) if method.init == "pretrained" else SLOW
    if isinstance(method, EWC) and kind is EWC:
        return ("ewc", method.form, method.fisher.model_dump())
    return ("lwf",) if kind is LwF else None


def _averaging(method: CoMA) -> tuple[Any, ...]:
    """Return how Fisher information is kept, if it is: that is all that differs from SLCA."""
    how = method.fisher.model_dump()
    if method.lam == "auto" or (isinstance(method, CoFiMA) and method.fisher_history == "accumulate"):
        return ("summed fisher", how, method.weight)
    if isinstance(method, CoFiMA):
        return ("fisher", how if method.variant == "paper" else None, method.variant)
    return SLOW
