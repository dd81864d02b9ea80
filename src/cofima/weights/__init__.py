"""Pure functions on state dicts: averages, distances, task vectors, Fisher information."""

from cofima.weights.average import average, average_all, fisher_average, fisher_average_all
from cofima.weights.distance import auto_lambda, weight_distance
from cofima.weights.equal_step import EqualStep, equal_step
from cofima.weights.fisher.diagonal import diagonal_fisher
from cofima.weights.ops import Weights, snapshot

__all__ = [
    "EqualStep",
    "Weights",
    "auto_lambda",
    "average",
    "average_all",
    "diagonal_fisher",
    "equal_step",
    "fisher_average",
    "fisher_average_all",
    "snapshot",
    "weight_distance",
]
