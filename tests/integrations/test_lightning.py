"""The callback in Lightning's own Trainer: checkpoints, the next task in another process, and DDP."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import cofima
from cofima.core.errors import CofimaError
from cofima.weights.ops import snapshot

lightning = pytest.importorskip("lightning.pytorch", reason="the extra [lightning] is not installed")
pytestmark = pytest.mark.slow

from cofima.integrations.lightning import ContinualAveraging  # noqa: E402


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result

    def training_step(self, batch: Any, _: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def data(task: int, batch: int = 4) -> "DataLoader[Any]":
    chance = torch.Generator().manual_seed(task)
    labels = torch.arange(16) % 2 + 2 * task
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=chance) + labels[:, None], labels), batch)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    fixed = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(
        default_root_dir=folder, callbacks=[*callbacks], **fixed, **{"max_epochs": 2} | options
    )


def test_checkpoints_hold_trained_weights_and_the_state(tmp_path: Path) -> None:
    module, callback = Module(), ContinualAveraging(lam=0.3, fisher=None)
    trainer(tmp_path / "one", callback).fit(module, data(0))
    before = snapshot(module)
    run = trainer(tmp_path / "two", callback)
    run.fit(module, data(1))
    trained = torch.load(run.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    merged = snapshot(module)
    for key, value in cofima.average(before, trained, 0.3).items():
        if "running" not in key:  # these are estimated anew
            assert torch.equal(merged[key], value), key
    assert module.training


@pytest.mark.parametrize("fisher", [None, "data"])
def test_a_task_that_is_resumed_ends_with_the_same_weights(fisher: Any, tmp_path: Path) -> None:
    def learn(where: Path, *, stop: bool) -> dict[str, Tensor]:
        module, callback = Module(), ContinualAveraging(fisher=fisher)
        run = trainer(where / "one", callback)
        run.fit(module, data(0))
        run.save_checkpoint(where / "one.ckpt")

        module = Module()  # another process: weights and the callback's state from the file
        module.load_state_dict(torch.load(where / "one.ckpt", weights_only=True)["state_dict"])
        callback = ContinualAveraging(fisher=fisher)
        callback.load_checkpoint(where / "one.ckpt")
        if stop:
            first = trainer(where / "two", callback, max_epochs=1)
            kept = where / "half.ckpt"
            first.callbacks.append(_SaveAfterEpoch(kept))
            first.fit(module, data(1))
            module, callback = Module(), ContinualAveraging(fisher=fisher)
            trainer(where / "three", callback).fit(module, data(1), ckpt_path=kept)
        else:
            trainer(where / "two", callback).fit(module, data(1))
        assert callback.merger is not None
        assert callback.merger.tasks == 2
        return snapshot(module)

    whole = learn(tmp_path / "whole", stop=False)
    for key, value in learn(tmp_path / "stopped", stop=True).items():
        torch.testing.assert_close(value, whole[key], rtol=1e-6, atol=1e-7)


class _SaveAfterEpoch(lightning.Callback):  # type: ignore[misc, name-defined]
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_after_a_task_begins_the_next(tmp_path: Path) -> None:
    module, callback = Module(), ContinualAveraging()
    run = trainer(tmp_path / "one", callback)
    run.fit(module, data(0))
    run.save_checkpoint(tmp_path / "one.ckpt")
    callback = ContinualAveraging()
    trainer(tmp_path / "two", callback, max_epochs=4).fit(Module(), data(1), ckpt_path=tmp_path / "one.ckpt")
    assert callback.merger is not None
    assert callback.merger.tasks == 2


def test_a_file_of_another_training_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(Module(), data(0))
    run.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(CofimaError, match="has no state of ContinualAveraging"):
        ContinualAveraging().load_checkpoint(tmp_path / "other.ckpt")


def learn_two_tasks(file: Path, devices: int) -> None:
    """Learn in double precision, alone or as one of two processes; the first writes what it has."""
    torch.set_default_dtype(torch.float64)
    try:
        module, callback = Module().double(), ContinualAveraging(fisher_history="accumulate")
        module.layers[1] = nn.Identity()  # batch statistics are those of a process's own samples
        more = {"strategy": "ddp", "devices": 2} if devices == 2 else {}
        for task in range(2):
            run = trainer(
                file, callback, precision="64-true", enable_checkpointing=False, max_epochs=3, **more
            )
            run.fit(module, data(task, batch=16 // devices))  # one step: the order does not matter
    finally:
        torch.set_default_dtype(torch.float32)
    if run.global_rank == 0:
        torch.save({"weights": module.state_dict(), "history": callback.state_dict()["history"]}, file)


def test_two_processes_end_with_the_weights_of_one(tmp_path: Path) -> None:
    learn_two_tasks(tmp_path / "1.pt", 1)
    script = tmp_path / "learn.py"  # which lightning starts once more
    script.write_text(
        f"from pathlib import Path\nfrom test_lightning import learn_two_tasks\n"
        f"learn_two_tasks(Path({str(tmp_path / '2.pt')!r}), 2)\n"
    )
    code = subprocess.run(
        [sys.executable, script], env=_environment(), capture_output=True, text=True, check=False
    )
    assert code.returncode == 0, code.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{devices}.pt", weights_only=True) for devices in (1, 2))
    for key, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][key], value, rtol=0, atol=1e-9)
    assert [row["samples"] for row in two["history"]] == [16, 16]
    assert [row["classes"] for row in two["history"]] == [2, 2]


def _environment() -> dict[str, str]:
    import os

    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
