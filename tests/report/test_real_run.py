"""Reports of runs that were really made: the reader and the writer agree on the form of a folder."""

import pytest
import yaml

from cofima import report
from cofima.experiment import config
from cofima.report.html import config_yaml
from cofima.store.config import StreamOptions


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Learn three tiny tasks with two methods."""
    root = tmp_path_factory.mktemp("real")
    for method in ("coma", "joint"):
        tiny.run(root / method, tiny.config(method, train={"epochs": 1}))
    return root


def test_a_real_run_is_read_and_tabulated(folder):
    runs = report.find([folder])
    coma = next(run for run in runs if run.method == "coma")
    assert coma.finished
    assert [len(row) for row in coma.matrix] == [1, 2, 3]
    assert coma.history[1].lam == 0.4
    assert all(distance > 0 for distance in coma.distances)
    assert all(seconds > 0 for seconds in coma.seconds)
    (comparison,) = report.compare(runs)
    table = comparison.table
    assert [row.cells[0].text for row in table.rows] == [
        run.label for run in sorted(runs, key=lambda run: run.all_at_once)
    ]
    assert "–" not in [cell.text for cell in table.rows[0].cells]
    assert "dataset blobs (fingerprint " in table.note


def test_the_config_on_the_page_can_be_run_again(folder, tmp_path):
    run = report.read(folder / "coma")
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(run))
    assert config.read(file).model_dump(mode="json") == run.config


def test_a_stream_of_groups_can_be_run_again(make_run, edit_run):
    stream = {"groups": [["a", "b"], ["c"]], "base_classes": 2, "increment": 2, "order_seed": None}
    folder = edit_run(make_run("a"), lambda content, _: content["config"].update(stream=stream))
    shown = yaml.safe_load(config_yaml(report.read(folder)))["stream"]
    assert shown == {"groups": [["a", "b"], ["c"]]}
    StreamOptions.model_validate(shown)
