"""The plugin in Avalanche's own strategies, beside its EWC plugin, on a benchmark like SplitMNIST."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import cofima
from cofima.weights.ops import first_rows, snapshot

avalanche = pytest.importorskip("avalanche", reason="the extra [avalanche] is not installed")
pytestmark = pytest.mark.slow

from avalanche.benchmarks import benchmark_from_datasets, with_classes_timeline  # noqa: E402
from avalanche.benchmarks.utils import as_classification_dataset  # noqa: E402
from avalanche.models import IncrementalClassifier  # noqa: E402
from avalanche.training.plugins import EWCPlugin  # noqa: E402
from avalanche.training.supervised import Naive  # noqa: E402

from cofima.integrations.avalanche import CoFiMAPlugin  # noqa: E402


class Growing(nn.Module):
    """A network whose head Avalanche lets grow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh())
        self.classifier = IncrementalClassifier(8, initial_out_features=2, masking=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.body(x))
        return result


def split_digits(count: int = 12) -> Any:
    """Return three experiences of two classes each: small images, as SplitMNIST has them."""
    sets = []
    for task in range(3):
        chance = torch.Generator().manual_seed(task)
        labels = torch.arange(count) % 2 + 2 * task
        images = torch.rand(count, 1, 6, 6, generator=chance)
        images[torch.arange(count), 0, labels] += 1
        data = TensorDataset(images, labels)
        data.targets = labels.tolist()
        sets.append(as_classification_dataset(data))
    return with_classes_timeline(benchmark_from_datasets(train=sets, test=sets))


def strategy(model: nn.Module, *plugins: Any, batch: int = 4) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Naive(
        model=model,
        optimizer=optimizer,
        train_mb_size=batch,
        train_epochs=2,
        plugins=[*plugins],
        evaluator=None,
    )


class Trained(avalanche.core.SupervisedPlugin):  # type: ignore[misc, name-defined]
    """Keep the weights before the average."""

    def after_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        self.weights = snapshot(strategy.model)


def test_an_experience_is_a_task_and_a_head_grows_by_rows() -> None:
    model, trained, plugin = Growing(), Trained(), CoFiMAPlugin(lam=0.3, fisher=None)
    learner = strategy(model, trained, plugin)
    for index, experience in enumerate(split_digits().train_stream):
        before = snapshot(model)
        learner.train(experience)
        assert len(model.classifier.classifier.weight) == 2 * index + 2
        if index:
            known = first_rows(trained.weights, before)
            for key, value in cofima.average(before, known, 0.3).items():
                assert torch.equal(model.state_dict()[key][: len(value)], value), key
            new = trained.weights["classifier.classifier.weight"][-2:]
            assert torch.equal(model.classifier.classifier.weight[-2:], new)
    assert plugin.merger is not None
    assert plugin.merger.tasks == 3


@pytest.mark.parametrize("batch", [1, 4])
def test_its_own_penalty_squares_the_gradients_of_batches(batch: int) -> None:
    """Its importances are the Fisher information where a batch is one image, and something else otherwise."""
    model = Growing()
    penalty, plugin = EWCPlugin(ewc_lambda=0.0), CoFiMAPlugin()
    strategy(model, penalty, plugin, batch=batch).train(split_digits().train_stream[0])
    assert plugin.merger is not None
    for key, value in plugin.merger.old_fisher.items():
        theirs = penalty.importances[0][key].data
        assert torch.allclose(theirs, value, rtol=1e-4, atol=1e-9) == (batch == 1), key
        if batch > 1:
            assert float(theirs.sum()) < float(value.sum())


def test_learning_goes_on_by_fisher_information() -> None:
    model = Growing()
    learner = strategy(model, CoFiMAPlugin())
    for experience in split_digits().train_stream:
        learner.train(experience)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
