"""Fixtures for tests in any folder. What computes is imported where it is used: the process that hands out
the tests to others, and computes nothing, reads this file too."""

import gc
import hashlib
import json
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import settings

from cofima.core import signals
from windows import need_unix

if TYPE_CHECKING:
    from torch import Tensor

    from cofima.data.image_set import ImageSet
    from cofima.store.config import Config
    from cofima.training.context import Batch
    from tiny import Tiny

settings.register_profile("ordinary", max_examples=100, deadline=None)
settings.load_profile("ordinary")
collect_ignore = [] if hasattr(os, "fork") else need_unix(Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without looking for garbage, and look at nothing of that afterwards.

    What torch and timm make when they are imported stays until the end: half a million objects, which every
    full collection would search.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Give them back: what is written in C complains of objects that outlive it."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _tiny_networks() -> None:
    """Register the tiny networks with timm, and limit torch to one thread."""
    import tiny  # noqa: F401


@pytest.fixture(scope="session")
def tiny() -> "type[Tiny]":
    """Return the makers of tiny configurations, streams, networks and runs."""
    from tiny import Tiny

    return Tiny


Make = Callable[[Path], object]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Make], Path]:
    """Return a function that creates a read-only folder once for all test processes.

    A folder is renamed when it is complete. If two processes create it at the same time, the first wins.
    """
    own = tmp_path_factory.getbasetemp()
    common = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    common.mkdir(exist_ok=True)

    def find(name: str, make: Make) -> Path:
        folder = common / hashlib.sha256(name.encode()).hexdigest()[:16]
        if not folder.exists():
            aside = tmp_path_factory.mktemp("aside") / "made"
            aside.mkdir()
            make(aside)
            with suppress(OSError):
                aside.rename(folder)
        return folder

    return find


@pytest.fixture(scope="session")
def pretrained(shared: Callable[[str, Make], Path], tiny: "type[Tiny]") -> Path:
    """Return a file of weights for ``vit_test`` that know blobs, but not those that the tests learn."""
    from safetensors.torch import save_file

    from cofima.data.sources.in_memory import blobs
    from cofima.data.stream import from_groups

    def learn(folder: Path) -> None:
        others = from_groups(blobs(16, per_class=12, side=16, seed=9), [list(range(6, 16))])
        config = tiny.config("seq_ft", train={"epochs": 20, "backbone_lr_scale": 1.0})
        model = tiny.model(config, others)
        model.method.learn(others[0])
        save_file(model.method.net.backbone.state_dict(), folder / "vit_test.safetensors")

    return shared("pretrained", learn) / "vit_test.safetensors"


@pytest.fixture(scope="session")
def unequal_tasks(pretrained: Path, tiny: "type[Tiny]") -> "Callable[..., Config]":
    """Return what configures a run of a method whose tasks have two classes, one and three.

    A transformer starts from weights worth staying close to.
    """
    from cofima import methods
    from cofima.methods.components.prompted import Prompted

    def configure(method: str, network: str = "vit_test", **options: Any) -> "Config":
        kind = methods.find(method)
        few = {"memory_size": 12} if "memory_size" in kind.__dataclass_fields__ else {}
        return tiny.config(
            method,
            network,
            options=few | options,
            model={"checkpoint": str(pretrained)} if network == "vit_test" else {"pretrained": False},
            stream={"groups": [["blob 0", "blob 1"], ["blob 2"], ["blob 3", "blob 4", "blob 5"]]},
            data={"max_train_per_class": 8, "max_test_per_class": 5},
            train={"epochs": 6 if issubclass(kind, Prompted) else 2, "batch_size": 8},  # prompts learn slowly
        )

    return configure


def _same_bits(a: "dict[str, Tensor]", b: "dict[str, Tensor]") -> None:
    import torch

    assert set(a) == set(b)
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert a[key].shape == b[key].shape, key
        assert torch.equal(a[key], b[key]), f"{key} differs by {(a[key] - b[key]).abs().max()}"


@pytest.fixture(scope="session")
def same_bits() -> "Callable[[dict[str, Tensor], dict[str, Tensor]], None]":
    """Return the assertion that two sets of weights are equal bit for bit."""
    return _same_bits


RECORDED = Path(__file__).with_name("regression.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records numbers instead of comparing with them."""
    parser.addoption("--renew", action="store_true", help=f"write this commit's numbers to {RECORDED.name}")


class Recorded:
    """Numbers that an earlier commit recorded, by section and name; renewed where asked."""

    def __init__(self, renew: bool) -> None:
        self.renew = renew
        self.known: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text("utf-8"))

    def __call__(self, section: str, name: str, found: Any) -> Any:
        """Return the recorded value; record and return the one that is found, if renewing."""
        if self.renew:
            self.known.setdefault(section, {})[name] = found
            RECORDED.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n", "utf-8")
        assert name in self.known[section], f"{name} is not recorded yet: pytest tests --renew -k regression"
        return self.known[section][name]

    def names(self, section: str) -> set[str]:
        """Return the names that are recorded."""
        return set(self.known[section])


@pytest.fixture(scope="session")
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """Return the numbers of an earlier commit."""
    renew = bool(request.config.getoption("--renew"))
    assert not (renew and hasattr(request.config, "workerinput")), "renew numbers without -n"
    return Recorded(renew)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Skip fsync, which protects against power cuts that no test simulates."""
    real = os.fsync
    os.fsync = lambda handle: os.fstat(handle) and None  # a handle that is not open is still refused
    yield
    os.fsync = real


@pytest.fixture(scope="session", autouse=True)
def _not_the_user_s_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep fixtures and subprocesses away from the user's cache."""
    os.environ["COFIMA_CACHE"] = str(tmp_path_factory.getbasetemp() / "caches")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own empty cache, and return its folder."""
    folder = tmp_path_factory.getbasetemp() / "caches" / uuid4().hex
    monkeypatch.setenv("COFIMA_CACHE", str(folder))
    return folder


class StoppedError(Exception):
    """Exception that a test raises in the middle of a run."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], type[StoppedError]]:
    """Return a function that makes every method fail in the middle of the task of this index, once."""
    from cofima.methods.base import Method

    def arrange(index: int, step: int = 3) -> type[StoppedError]:
        whole, taken = Method.after_step, []

        def after_step(self: Method, batch: "Batch") -> None:
            whole(self, batch)
            taken.append(self.task.index)
            if taken.count(index) == step:
                raise StoppedError

        monkeypatch.setattr(Method, "after_step", after_step)
        return StoppedError

    return arrange


@pytest.fixture(scope="session")
def spied_images() -> "Callable[[ImageSet, Callable[[], None]], ImageSet]":
    """Return a function that makes a set of images call back whenever its pixels are taken."""
    from cofima.data.image_set import ImageSet

    class Spied(ImageSet):
        def batch(self, index: "Tensor") -> "tuple[Tensor, Tensor]":
            self.called()  # type: ignore[attr-defined]
            return super().batch(index)

    def wrap(images: ImageSet, called: Callable[[], None]) -> ImageSet:
        spied = Spied(images.pixels, images.rows, images.labels)
        object.__setattr__(spied, "called", called)
        return spied

    return wrap


@pytest.fixture
def fresh_signals() -> Iterator[None]:
    """Restore the default signal handlers, which a library may have changed in this process."""
    before = {number: signal.signal(number, own) for number, own in signals.DEFAULTS.items()}
    yield
    for number, own in before.items():
        signal.signal(number, own)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of grids from a process that has imported torch, instead of importing it in each."""
    import forked
    from cofima.experiment.grid.executors import local

    monkeypatch.setattr(local, "worker_context", forked.context)
