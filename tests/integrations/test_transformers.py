"""The callback in transformers' own Trainer, with a tiny text classifier of random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cofima
from cofima.core.errors import CofimaError
from cofima.weights.ops import first_rows, snapshot

transformers = pytest.importorskip("transformers", reason="the extra [transformers] is not installed")
pytestmark = pytest.mark.slow

from cofima.integrations.transformers import CoFiMACallback  # noqa: E402

Texts = list[dict[str, Any]]


def texts(first: int, seed: int, count: int = 16) -> Texts:
    """Return sentences of two classes, each of which has a word of its own; some are shorter than others."""
    chance = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        label = first + index % 2
        words = torch.randint(10, 30, (3 + index % 3,), generator=chance).tolist()
        ids = [*words, label + 1] + [0] * (2 - index % 3)
        made.append({"input_ids": ids, "attention_mask": [int(word > 0) for word in ids], "labels": label})
    return made


def classifier(labels: int = 2) -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.1,
            num_labels=labels,
        )
    )


def grow(model: Any, labels: int) -> None:
    torch.manual_seed(labels)
    old, new = model.classifier, nn.Linear(16, labels)
    with torch.no_grad():
        new.weight[: len(old.weight)] = old.weight
        new.bias[: len(old.bias)] = old.bias
    model.classifier = new
    model.config.num_labels = model.num_labels = labels


class StopAtError(Exception):
    """The process dies."""


class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise StopAtError


def trainer(model: Any, data: Texts, folder: Path, *callbacks: Any, **options: Any) -> Any:
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "save_strategy": "epoch",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    } | options
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[*callbacks],
    )


def saved(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def last_checkpoint(folder: Path) -> dict[str, Tensor]:
    return saved(max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-6, atol=1e-7, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.parametrize("fisher", [None, "data"])
def test_three_tasks_each_in_a_process_of_its_own(fisher: Any, tmp_path: Path) -> None:
    model = classifier()
    for task in range(3):
        if task:
            model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / f"model{task - 1}")
            before = snapshot(model)
            grow(model, 2 * task + 2)
        callback = CoFiMACallback(lam=0.3, fisher=fisher, state=tmp_path / "state")
        run = trainer(
            model,
            texts(2 * task, seed=task),
            tmp_path / f"out{task}",
            callback,
            gradient_accumulation_steps=2,
        )
        run.train()
        run.save_model(tmp_path / f"model{task}")
        merged, trained = saved(tmp_path / f"model{task}"), last_checkpoint(tmp_path / f"out{task}")
        if task == 0:
            assert_same(merged, trained)  # nothing to average with
            continue
        assert callback.merger is not None
        assert callback.merger.tasks == task + 1
        known = first_rows(trained, {key: before[key] for key in trained})
        if fisher is None:
            assert_same(first_rows(merged, known), cofima.average(before, known, 0.3))
        else:
            assert any(not torch.equal(merged[key], trained[key]) for key in trained)
        assert torch.equal(merged["classifier.weight"][-2:], trained["classifier.weight"][-2:])


def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    def learn(where: Path, *, stop: bool) -> dict[str, Tensor]:
        model = classifier()
        state = where / "state"
        trainer(model, texts(0, 0), where / "one", CoFiMACallback(state=state)).train()
        start = snapshot(model)
        if stop:
            with pytest.raises(StopAtError):
                trainer(model, texts(0, 1), where / "two", CoFiMACallback(state=state), Stop(5)).train()
            model = classifier()  # another process: its model has the weights before the task, or any
            model.load_state_dict(start)
        run = trainer(model, texts(0, 1), where / "two", CoFiMACallback(state=state))
        run.train(resume_from_checkpoint=stop)
        return snapshot(run.model)

    whole = learn(tmp_path / "whole", stop=False)
    assert_same(learn(tmp_path / "stopped", stop=True), whole)
    # what has ended already and is resumed once more ends the same
    again = trainer(
        classifier(),
        texts(0, 1),
        tmp_path / "whole" / "two",
        CoFiMACallback(state=tmp_path / "whole" / "state"),
    )
    again.train(resume_from_checkpoint=True)
    assert_same(snapshot(again.model), whole)


def test_the_best_model_is_averaged(tmp_path: Path) -> None:
    model = classifier()
    callback = CoFiMACallback(lam=0.5, fisher=None)  # without a folder: the same object for all tasks
    trainer(model, texts(0, 0), tmp_path / "one", callback).train()
    before = snapshot(model)
    worse = iter([0.1, 0.5])
    run = trainer(
        model,
        texts(0, 1),
        tmp_path / "two",
        callback,
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    run.evaluate = lambda *_, **__: _evaluated(run, next(worse))
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-4")
    assert_same(snapshot(run.model), cofima.average(before, saved(tmp_path / "two" / "checkpoint-4"), 0.5))


def _evaluated(run: Any, loss: float) -> dict[str, float]:
    metrics = {"eval_loss": loss}
    run.control = run.callback_handler.on_evaluate(run.args, run.state, run.control, metrics)
    return metrics


def test_what_is_not_known_is_not_resumed(tmp_path: Path) -> None:
    trainer(classifier(), texts(0, 0), tmp_path).train()
    for callback in (CoFiMACallback(), CoFiMACallback(state=tmp_path / "other")):
        with pytest.raises(CofimaError, match="the training cannot resume"):
            trainer(classifier(), texts(0, 0), tmp_path, callback).train(resume_from_checkpoint=True)


def test_its_fisher_information_is_that_of_the_obvious_loop(tmp_path: Path) -> None:
    model, data = classifier().double(), texts(0, 0, count=6)
    merger = cofima.ContinualAverage(model)
    loader = [{key: torch.tensor([row[key] for row in data]) for key in data[0]}]
    with merger.task(loader):
        pass
    model.eval()
    parameters = dict(model.named_parameters())
    expected = {key: torch.zeros_like(p) for key, p in parameters.items()}
    for index in range(len(data)):
        loss = model(**{key: value[index : index + 1] for key, value in loader[0].items()}).loss
        for key, grad in zip(expected, torch.autograd.grad(loss, [*parameters.values()]), strict=True):
            expected[key] += grad.square() / len(data)
    for key, value in merger.old_fisher.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-8, atol=1e-14)
