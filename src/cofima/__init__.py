"""cofima: teach a pre-trained image classifier new classes without the old images."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# OpenMP threads spin while they wait: if another process is busy, two are several times slower than one. With
# this setting, which is only read when torch is loaded, they sleep instead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cofima.core import plugins

if TYPE_CHECKING:
    from cofima.classifier.classifier import Classifier, learn, load
    from cofima.classifier.forgetting_check import ForgettingError
    from cofima.classifier.merge.fisher_file import fisher
    from cofima.classifier.merge.merge import merge
    from cofima.classifier.predict import Prediction
    from cofima.classifier.sklearn import ImageClassifier
    from cofima.integrations.loop import ContinualAverage
    from cofima.store.model import Model
    from cofima.weights import (
        auto_lambda,
        average,
        average_all,
        diagonal_fisher,
        equal_step,
        fisher_average,
        fisher_average_all,
        weight_distance,
    )

__version__ = "0.1.0"

__all__ = [
    "Classifier",
    "ContinualAverage",
    "ForgettingError",
    "ImageClassifier",
    "Model",
    "Prediction",
    "auto_lambda",
    "average",
    "average_all",
    "diagonal_fisher",
    "equal_step",
    "fisher",
    "fisher_average",
    "fisher_average_all",
    "learn",
    "load",
    "merge",
    "plugins",
    "weight_distance",
]

# Imported on first use: torch, timm and scikit-learn take seconds to import.
_MODULES = {
    "Classifier": "cofima.classifier.classifier",
    "ContinualAverage": "cofima.integrations.loop",
    "ForgettingError": "cofima.classifier.forgetting_check",
    "ImageClassifier": "cofima.classifier.sklearn",
    "Model": "cofima.store.model",
    "Prediction": "cofima.classifier.predict",
    "auto_lambda": "cofima.weights",
    "average": "cofima.weights",
    "average_all": "cofima.weights",
    "diagonal_fisher": "cofima.weights",
    "equal_step": "cofima.weights",
    "fisher": "cofima.classifier.merge.fisher_file",
    "fisher_average": "cofima.weights",
    "fisher_average_all": "cofima.weights",
    "learn": "cofima.classifier.classifier",
    "load": "cofima.classifier.classifier",
    "merge": "cofima.classifier.merge.merge",
    "weight_distance": "cofima.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = value = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
