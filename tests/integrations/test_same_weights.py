"""One model, three tasks, the same batches: every framework ends with the weights of ``cofima run``."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from cofima import ContinualAverage
from cofima.core.seeds import Seeds
from cofima.data.transforms import View
from cofima.methods.base import Method
from cofima.models.net import Net
from cofima.training.loop import make_optimizer
from cofima.training.options import TrainOptions

BATCH = 8


@dataclass
class Lessons:
    """What a run saw and became."""

    net: Net
    """As it was before the first task."""
    seed: int
    options: TrainOptions
    tasks: list[tuple[Tensor, Tensor]]
    """Images and labels of each task, in the order of its steps."""
    weights: dict[str, Tensor]

    def sizes(self) -> Iterator[tuple[int, range]]:
        """Yield the index and the classes of each task."""
        for index, (_, labels) in enumerate(self.tasks):
            yield index, range(int(labels.min()), int(labels.max()) + 1)

    def loader(self, index: int, batch_size: int = BATCH) -> "DataLoader[Any]":
        return DataLoader(TensorDataset(*self.tasks[index]), batch_size)


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Iterator[Lessons]:
    """Learn three tasks in float64 as ``cofima run`` does, and write down every batch."""
    single, seen = View._normalized, {}
    patch = pytest.MonkeyPatch()
    patch.setattr(View, "_normalized", lambda self, images: single(self, images).double())
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)

    def after_step(self: Method, batch: Any) -> None:
        seen.setdefault(self.task.index, []).append((batch.images, batch.labels))

    patch.setattr(Method, "after_step", after_step)
    config = tiny.config(
        "cofima", train={"epochs": 1, "batch_size": BATCH, "lr": 0.1, "backbone_lr_scale": 0.5}
    )
    stream = tiny.stream((2, 2, 2), per_class=12)
    start = copy.deepcopy(tiny.model(config, stream).method.net)
    model = tiny.run(tmp_path_factory.mktemp("run"), config, stream)
    patch.undo()
    tasks = [tuple(torch.cat(part) for part in zip(*steps, strict=True)) for steps in seen.values()]
    yield Lessons(start, config.seed, config.train, tasks, model.method.net.state_dict())  # type: ignore[arg-type]
    torch.set_default_dtype(torch.float32)


class Learner(nn.Module):
    """The network with the loss of a task, for frameworks that ask the model for it."""

    def __init__(self, lessons: Lessons) -> None:
        super().__init__()
        self.net, self.lessons, self.first = copy.deepcopy(lessons.net), lessons, 0

    def grow(self, index: int, classes: range) -> None:
        self.first = classes.start
        self.net.grow(len(classes), Seeds(self.lessons.seed).generator("head", index))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(images)
        return logits if labels is None else {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits[:, self.first :], labels - self.first)

    def optimizer(self) -> torch.optim.SGD:
        return make_optimizer(self.net, self.lessons.options)


def own_loop(lessons: Lessons, tmp_path: Path) -> nn.Module:
    learner = Learner(lessons)
    merger = ContinualAverage(learner)
    for index, classes in lessons.sizes():
        learner.grow(index, classes)
        with merger.task(loader := lessons.loader(index)):
            optimizer = learner.optimizer()
            for images, labels in loader:
                optimizer.zero_grad()
                torch.autograd.backward(learner(images, labels)["loss"])
                optimizer.step()
    return learner


def transformers_trainer(lessons: Lessons, tmp_path: Path) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
    from cofima.integrations.transformers import CoFiMACallback

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    learner = Learner(lessons)
    for index, classes in lessons.sizes():
        learner.grow(index, classes)
        images, labels = lessons.tasks[index]
        optimizer = learner.optimizer()
        trainer = InOrder(
            learner,
            transformers.TrainingArguments(
                str(tmp_path / "out"),
                num_train_epochs=1,
                per_device_train_batch_size=BATCH,
                max_grad_norm=0,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=[{"images": x, "labels": y} for x, y in zip(images, labels.tolist(), strict=True)],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
            callbacks=[CoFiMACallback(state=tmp_path / "state")],
        )
        trainer.train()
    return learner


def lightning_trainer(lessons: Lessons, tmp_path: Path) -> nn.Module:
    lightning = pytest.importorskip("lightning.pytorch", reason="the extra [lightning] is not installed")
    from cofima.integrations.lightning import ContinualAveraging

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.learner = Learner(lessons)

        def forward(self, images: Tensor) -> Any:
            return self.learner(images)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.learner(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return self.learner.optimizer()

    module, callback = Module(), ContinualAveraging()
    for index, classes in lessons.sizes():
        module.learner.grow(index, classes)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            precision="64-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
            default_root_dir=tmp_path,
        )
        trainer.fit(module, lessons.loader(index))
    return module.learner


def avalanche_strategy(lessons: Lessons, tmp_path: Path) -> nn.Module:
    pytest.importorskip("avalanche", reason="the extra [avalanche] is not installed")
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.training.supervised import Naive

    from cofima.integrations.avalanche import CoFiMAPlugin

    class InOrder(Naive):
        def criterion(self) -> Any:
            return self.model.loss(self.mb_output, self.mb_y) if self.is_training else super().criterion()

        def make_train_dataloader(self, **_: Any) -> None:
            super().make_train_dataloader(shuffle=False)

        def make_optimizer(self, **_: Any) -> None:
            self.optimizer = self.model.optimizer()
            self.optimized_param_id = {}

    learner = Learner(lessons)
    sets = [as_classification_dataset(_with_targets(TensorDataset(*task))) for task in lessons.tasks]
    benchmark = benchmark_from_datasets(train=sets, test=sets)
    strategy = InOrder(
        model=learner,
        optimizer=torch.optim.SGD(learner.net.backbone.parameters(), 0.1),
        train_mb_size=BATCH,
        plugins=[CoFiMAPlugin()],
        evaluator=None,
    )
    for (index, classes), experience in zip(lessons.sizes(), benchmark.train_stream, strict=True):
        learner.grow(index, classes)
        strategy.train(experience)
    return learner


def _with_targets(data: TensorDataset) -> TensorDataset:
    data.targets = data.tensors[1].tolist()
    return data


@pytest.mark.parametrize(
    "learn",
    [
        own_loop,
        pytest.param(transformers_trainer, marks=pytest.mark.slow),  # frameworks take seconds to import
        pytest.param(lightning_trainer, marks=pytest.mark.slow),
        pytest.param(avalanche_strategy, marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_those_of_a_run(
    learn: Callable[[Lessons, Path], nn.Module], lessons: Lessons, tmp_path: Path
) -> None:
    found = learn(lessons, tmp_path).net.state_dict()  # type: ignore[union-attr, operator]
    start = dict(lessons.net.state_dict())
    assert found.keys() == lessons.weights.keys()
    for key, value in lessons.weights.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
    moved = max(
        float((start[key] - value).abs().max()) for key, value in lessons.weights.items() if key in start
    )
    assert moved > 1e-3  # so that equal weights say something
