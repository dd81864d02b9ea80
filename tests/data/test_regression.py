"""Hashes of splits as an earlier commit recorded them: a user's results name them, so they never change."""

from pathlib import Path
from typing import Any

import pytest

from cofima.data import datasets, sources
from cofima.data.options import DataOptions

pytestmark = pytest.mark.filterwarnings("ignore:.*known for:cofima.core.errors.CofimaWarning")


def test_splits_of_known_datasets_have_the_recorded_hashes(
    make: Any, tried: set[tuple[str, str]], tmp_path: Path, recorded: Any, subtests: pytest.Subtests
) -> None:
    for dataset, layout in sorted(tried):
        with subtests.test(dataset=dataset, layout=layout):
            root = tmp_path / dataset / layout
            make(dataset, layout, root)
            found = sources.find(dataset, DataOptions(root=root)).facts["split_hash"]
            assert found == recorded("splits", f"{dataset}, {layout}", found)


CHOSEN: dict[str, DataOptions] = {
    "as it is": DataOptions(),
    "another seed": DataOptions(split_seed=3),
    "another share": DataOptions(test_fraction=0.4),
}


@pytest.mark.parametrize("choice", CHOSEN)
def test_splits_that_are_drawn_have_the_recorded_hashes(
    choice: str, make: Any, tmp_path: Path, recorded: Any, subtests: pytest.Subtests
) -> None:
    make("imagenet_r", "unsplit", tmp_path)
    (plain,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in ("digits", "blobs", f"folder:{plain}"):
        with subtests.test(dataset=name):
            found = datasets.load(name, 8, options=CHOSEN[choice]).facts["split_hash"]
            assert found == recorded("splits", f"{name.partition(':')[0]}, {choice}", found)
