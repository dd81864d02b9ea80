"""Small checkpoints to merge: files of several types, and folders of tiny runs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cofima.data.sources.in_memory import blobs
from cofima.data.stream import from_groups
from cofima.models import backbone

Tensors = dict[str, Tensor]


def checkpoint(seed: int) -> Tensors:
    """Return weights of several types and shapes, an empty and a scalar one among them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return {
        "a.weight": normal(7, 5),
        "a.bias": normal(7),
        "half": normal(3, 4).half(),
        "brain": normal(9).bfloat16(),
        "double": normal(4).double(),
        "scalar": normal(()),
        "nothing": normal(0, 3),
        "count": torch.tensor(seed),
        "mask": torch.tensor([True, seed % 2 == 0]),
        "bytes": torch.full((3,), seed, dtype=torch.uint8),
    }


def fisher_of(weights: Tensors, seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    names = [key for key, value in weights.items() if value.is_floating_point() and key != "double"]
    return {key: torch.rand(weights[key].shape, generator=draw) for key in names}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return three checkpoints and a base, in this order: a, b, c, base."""
    paths = [tmp_path / f"{name}.safetensors" for name in ("a", "b", "c", "base")]
    for seed, path in enumerate(paths):
        save_file(checkpoint(seed), path, {"format": "pt", "name": path.stem})
    return paths


@pytest.fixture
def fishers(tmp_path: Path) -> list[Path]:
    """Return the Fisher information of a, b and c; the tensor ``double`` has none."""
    paths = [tmp_path / f"fisher_{name}.safetensors" for name in "abc"]
    for seed, path in enumerate(paths):
        save_file(fisher_of(checkpoint(seed), seed + 10), path)
    return paths


Learn = Callable[..., Path]


@pytest.fixture(scope="session")
def learn(tiny, tmp_path_factory: pytest.TempPathFactory) -> Learn:
    """Return a function that learns classes of the blobs into a folder; each run is made once."""
    made: dict[str, Path] = {}
    place = tmp_path_factory.mktemp("folders")

    def run(
        method: str, groups: Sequence[Sequence[int]], network: str = "vit_test", **options: object
    ) -> Path:
        key = f"{method} {groups} {network} {options}"
        if key not in made:
            config = tiny.config(method, network, train={"epochs": 1}, options=options)
            stream = from_groups(blobs(8, per_class=4, side=16), groups)
            made[key] = place / str(len(made))
            tiny.run(made[key], config, stream)
        return made[key]

    return run


@pytest.fixture(scope="session")
def start(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the weights that every run of ``learn`` starts from."""
    config = tiny.config("seq_ft")
    net, _ = backbone.create(config.backbone, config.model, config.seed)
    path = tmp_path_factory.mktemp("start") / "start.safetensors"
    save_file(net.state_dict(), path)
    return path
