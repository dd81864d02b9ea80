"""Disk and memory use do not grow with the number of tasks: 12 classes, split in three ways."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cofima import methods
from cofima.store.model import Model
from cofima.store.record import STATE

CLASSES = 12
DEALT = (2, 3, 4)
AVERAGE = {"coma": "average", "cofima": "fisher_average"}


@pytest.fixture(scope="module", autouse=True)
def _thawed() -> Iterator[None]:
    """Give all objects back to the collector after the last of these tests."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _only_what_is_new() -> None:
    """Put aside all objects from before the test: they are neither counted nor searched.

    They stay aside until the last test of this file: searching them all before each takes longer than a test.
    """
    gc.collect()
    gc.freeze()


def storages() -> dict[int, int]:
    """Return the bytes of every storage that a live tensor of this test holds, each once."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        try:
            if issubclass(type(thing), torch.Tensor):  # isinstance would wake lazy stand-ins
                whole = thing.untyped_storage()
                found[whole.data_ptr()] = whole.nbytes()
        except (RuntimeError, ReferenceError, NotImplementedError):  # tensors without storage
            continue
    return found


def learned(tiny, name: str, tasks: int, options: dict, folder: Path | None = None) -> tuple[Model, int]:
    """Return the model after all tasks, and the bytes that it keeps alive; written to disk if asked."""
    stream = tiny.stream((CLASSES // tasks,) * tasks, per_class=3)
    small = {"align": {"epochs": 1, "samples_per_class": 2}, "memory_size": 2 * CLASSES}
    brief = {key: value for key, value in small.items() if hasattr(methods.build(name), key)}
    config = tiny.config(name, train={"epochs": 1, "batch_size": 32}, options=brief | options)
    before = storages()
    if folder is None:
        model = tiny.model(config, stream)
        for task in model.method.stream(stream):
            model.method.learn(task)
    else:
        model = tiny.run(folder, config, stream)
    after = storages()
    return model, sum(size for place, size in after.items() if place not in before)


VARIANTS = [(name, {}) for name in methods.names()] + [
    ("coma", {"lam": "auto"}),
    ("cofima", {"fisher_history": "accumulate"}),
    ("cofima", {"variant": "authors"}),
]


def assert_flat(held: list[int], tiny) -> None:
    """One more copy of the network a task would be seen at once."""
    network = sum(p.numel() * 4 for p in tiny.net().backbone.parameters())
    assert max(held) - min(held) < network / 2, held


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_state_and_memory_do_not_grow_with_the_number_of_tasks(name: str, options: dict, tiny) -> None:
    grows = methods.find(name).grows_with_tasks
    kept, weights, held = [], [], []
    network = sum(p.numel() * 4 for p in tiny.net().backbone.parameters())
    for tasks in DEALT if grows else DEALT[:2]:
        model, bytes_held = learned(tiny, name, tasks, options)
        kept.append(sum(v.numel() * v.element_size() for v in model.method.state().values()))
        weights.append(sum(v.numel() * v.element_size() for v in model.weights().values()))
        held.append(bytes_held)
        # the network, what the method calls its state, and no third thing of their size
        assert bytes_held < weights[-1] + kept[-1] + network / 2
        del model
    if grows:  # then by the same for each task, and by little
        assert (kept[2] - kept[1]) * (DEALT[1] - DEALT[0]) == (kept[1] - kept[0]) * (DEALT[2] - DEALT[1])
    else:
        assert len(set(kept)) == 1
    assert len(set(weights)) == 1
    assert_flat(held, tiny)


def test_the_folder_and_the_run_do_not_grow_either(tiny, tmp_path: Path) -> None:
    held, sizes = [], []
    for tasks in DEALT:
        _, bytes_held = learned(tiny, "cofima", tasks, {}, tmp_path / str(tasks))
        held.append(bytes_held)
        files = [p for p in (tmp_path / str(tasks)).rglob("*.safetensors") if p.parent.name == f"{tasks:04d}"]
        sizes.append({p.name: p.stat().st_size // 2000 for p in files})  # headers name one block more or less
        # two generations with a backbone each, CURRENT, .lock, metrics
        assert len(list((tmp_path / str(tasks)).iterdir())) == 7
    assert_flat(held, tiny)
    state = [size[STATE] for size in sizes]
    assert max(state) - min(state) <= 2


@pytest.mark.parametrize(("name", "most"), [("seq_ft", 0), ("coma", 1), ("cofima", 3)])
def test_how_many_copies_a_merge_holds_at_most(
    name: str, most: int, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CoMA: the old weights. CoFiMA: the old weights and two Fishers. The average itself needs none."""
    stream = tiny.stream((2, 2, 2), per_class=4)
    model = tiny.model(tiny.config(name, train={"epochs": 1}), stream)
    network = sum(p.numel() * 4 for p in model.method.net.backbone.parameters())
    start, peaks = sum(storages().values()), []

    def look() -> None:
        peaks.append((sum(storages().values()) - start) / network)

    if name != "seq_ft":
        module, average = sys.modules[type(model.method).__module__], AVERAGE[name]
        real = getattr(module, average)
        monkeypatch.setattr(module, average, lambda *a, **k: (real(*a, **k), look()))
    for task in stream:
        model.method.learn(task)
    look()
    assert max(peaks) < most + 0.6, peaks
