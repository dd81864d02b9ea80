"""Shards of a batch: together they are the whole batch, and augmentation does not depend on them."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cofima import methods
from cofima.cli import console
from cofima.cli.main import app
from cofima.core import distributed, torchrun
from cofima.core.errors import CofimaError
from cofima.data.transforms import View
from cofima.experiment.launch import launch
from cofima.methods.components import fisher as fisher_module
from cofima.methods.components.fisher import FisherOptions, released_fisher, task_fisher
from cofima.training import device

COLOR = (0.5, 0.5, 0.5)
VIEWS = {
    "crop": View(16, 20, COLOR, COLOR, flip=True, crop=0.3, brightness=0.2),
    "window": View(16, 20, COLOR, COLOR, flip=True, whole=20, window=True, shape=(24, 22)),
    "plain": View(16, 16, COLOR, COLOR),
}


def parts(count: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> list[distributed.Shard]:
    """Return the part of each process."""
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    found = []
    for number in range(processes):
        monkeypatch.setattr(distributed, "rank", lambda number=number: number)
        found.append(distributed.current_shard(count))
    return found


def test_parts_are_all_of_it_in_order(monkeypatch, subtests: pytest.Subtests) -> None:
    for count, processes in product((1, 2, 3, 5, 8, 23), (1, 2, 3, 8)):
        with subtests.test(count=count, processes=processes):
            found = parts(count, processes, monkeypatch)
            sizes = [part.stop - part.start for part in found]
            if count < processes:  # then each takes all
                assert sizes == [count] * processes
                assert not any(part.shared for part in found)
            else:
                assert torch.cat([torch.arange(count)[part.rows] for part in found]).tolist() == list(
                    range(count)
                )
                assert max(sizes) - min(sizes) <= 1
                assert max(sizes) == distributed.largest_shard(count)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 23])
def test_the_average_of_weighted_means_is_the_mean(count: int, processes: int, monkeypatch) -> None:
    values = torch.randn(count, dtype=torch.float64)
    means = [part.weight * values[part.rows].mean() for part in parts(count, processes, monkeypatch)]
    torch.testing.assert_close(torch.stack(means).mean(), values.mean())


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("processes", [2, 3])
def test_an_image_is_varied_the_same_in_any_part(name: str, processes: int, monkeypatch) -> None:
    view = VIEWS[name]
    height, width = view.shape or (view.stored, view.stored)
    pixels = torch.randint(256, (7, 3, height, width), dtype=torch.uint8)
    together = torch.Generator().manual_seed(1)
    whole = view.train(pixels, together)
    apart = []
    for part in parts(7, processes, monkeypatch):
        chance = torch.Generator().manual_seed(1)
        apart.append(view.train(pixels[part.rows], chance, part))
        assert torch.equal(chance.get_state(), together.get_state())  # the next batch is the same, too
    assert torch.equal(torch.cat(apart), whole)


@pytest.mark.parametrize("estimate", ["data", "sampled", "exact", "released"])
@pytest.mark.parametrize("processes", [2, 3])
def test_the_fisher_information_of_parts_adds_up_to_that_of_all(
    estimate: str, processes: int, tiny, monkeypatch
) -> None:
    net, (task,) = tiny.net(sizes=(3,)).double(), tiny.stream((3,), per_class=6)
    context = tiny.context({"batch_size": 5})
    context = replace(context, view=replace(context.view, crop=0.5, flip=True))

    def fisher() -> dict[str, torch.Tensor]:
        if estimate == "released":
            return released_fisher(net, task, context)
        return task_fisher(net, task, context, FisherOptions(labels=estimate))

    monkeypatch.setattr(fisher_module, "RELEASED_CLIP", torch.inf)
    whole = fisher()
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda value: value)
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    found = []
    for number in range(processes):
        monkeypatch.setattr(distributed, "rank", lambda number=number: number)
        found.append(fisher())
    for key, value in whole.items():
        torch.testing.assert_close(sum(one[key] for one in found), value, rtol=1e-10, atol=1e-15)
        assert not torch.equal(found[0][key], found[1][key])


def test_one_process_is_left_as_it_was() -> None:
    rows = torch.arange(5.0)
    part = distributed.current_shard(5)
    assert (part.start, part.stop, part.whole, part.weight) == (0, 5, 5, 1.0)
    assert part.gather(rows) is rows
    assert part.mean(rows) is rows
    assert distributed.all_reduce_sum(rows) is rows
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert torchrun.world_size() == distributed.world_size() == 1


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the first of two processes that torchrun started; the other is never waited for."""
    said = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)


def refused(config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("cofima.data.datasets.load", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(CofimaError) as error:
        launch(config, folder)
    assert not folder.exists()
    return str(error.value)


@pytest.mark.usefixtures("of_two")
def test_what_several_processes_cannot_share_is_refused_before_any_work(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods.find("seq_ft"), "single_process_only", "it looks at whole batches")
    config = tiny.config("seq_ft", train={"batch_size": 1}, device="cuda:1")
    said = refused(config, tmp_path / "run", monkeypatch)
    assert "a run in 2 processes" in said
    assert "method = seq_ft: it looks at whole batches" in said
    assert "train.batch_size = 1: smaller than the number of processes" in said
    assert "device = cuda:1: one for all" in said


@pytest.mark.usefixtures("of_two")
def test_statistics_of_batches_are_refused_unless_they_are_frozen(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "process_group", lambda _: nullcontext())
    said = refused(tiny.config("slca", "resnet_test"), tmp_path / "run", monkeypatch)
    assert "train.batchnorm=frozen" in said
    from cofima.experiment.launch import refuse_several

    backbone = tiny.net("resnet_test").backbone
    refuse_several(tiny.config("slca", "resnet_test", train={"batchnorm": "frozen"}), backbone)
    refuse_several(tiny.config("prototype", "resnet_test"), backbone)  # it trains nothing
    refuse_several(tiny.config("slca"), tiny.net("vit_test").backbone)


@pytest.mark.usefixtures("of_two")
def test_other_commands_are_for_one_process() -> None:
    done = CliRunner().invoke(app, ["list", "methods"])
    assert isinstance(done.exception, CofimaError)
    assert str(done.exception) == "cofima list runs in one process: start it without torchrun"


@pytest.mark.usefixtures("of_two")
def test_each_process_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto") == device.choose("cpu") == torch.device("cpu")
    with pytest.raises(CofimaError, match="has no GPU, there are 0"):
        device.choose("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device.choose("auto") == device.choose("cuda") == torch.device("cuda", 1)


@pytest.mark.usefixtures("of_two")
def test_only_the_first_process_speaks(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert torchrun.is_main_process()
    monkeypatch.setenv("RANK", "1")
    assert not torchrun.is_main_process()
    monkeypatch.setattr(console, "GRACE", 0)
    console.complain(CofimaError("there is no disk"))  # what the first process did not see
    assert capsys.readouterr().err.strip() == "cofima (process 1): there is no disk"
