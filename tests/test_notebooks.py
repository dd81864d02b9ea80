"""The notebooks: plain Python without outputs, and they run from the first cell to the last."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def read(notebook: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(notebook.read_text("utf-8"))
    return found


def test_there_are_two() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["photographs", "table1_in_small"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_python_without_outputs(notebook: Path) -> None:
    cells = [cell for cell in read(notebook)["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        ast.parse("".join(cell["source"]))
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = nbformat.read(notebook, as_version=4)
    for cell in made.cells:  # fewer images: what is tested is that every cell works
        cell.source = cell.source.replace("IMAGES = 20", "IMAGES = 4")
    nbclient.NotebookClient(made, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    assert all(cell.execution_count for cell in made.cells if cell.cell_type == "code")
