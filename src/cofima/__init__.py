"""cofima: teach a pre-trained image classifier new classes without forgetting the old ones."""

import os

# Two OpenMP threads that spin while they wait are several times slower than one when another process
# is busy; asked before torch is loaded, they sleep instead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cofima.merging import fisher, merge
from cofima.serve.check import ForgettingError
from cofima.serve.classifier import Classifier, learn, load
from cofima.serve.predict import Prediction
from cofima.store import Model
from cofima.weights import (
    auto_lambda,
    average,
    average_all,
    diagonal_fisher,
    fisher_average,
    fisher_average_all,
    weight_distance,
)

__version__ = "0.1.0"

__all__ = [
    "Classifier",
    "ForgettingError",
    "Model",
    "Prediction",
    "auto_lambda",
    "average",
    "average_all",
    "diagonal_fisher",
    "fisher",
    "fisher_average",
    "fisher_average_all",
    "learn",
    "load",
    "merge",
    "weight_distance",
]
