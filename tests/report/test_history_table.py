"""The table of a history has what each change did, and is empty where nothing was measured."""

from cofima.report.history import TITLES, features_kept, history_table
from cofima.store.history import HistoryRow, OldClasses


def test_each_change_is_a_row() -> None:
    old = OldClasses(before=81.0, after=79.5, measured=False, rests_on="an estimate")
    rows = [
        HistoryRow(kind="learn", task=1, classes=list("abcdef"), date="2026-01-02T03:04:05+00:00"),
        HistoryRow(kind="extend", task=2, classes=["g"], train_images=4, lam=0.4, old=old),
        HistoryRow(kind="rename", task=2, classes=["g", "the g"]),
    ]
    rows[1].accuracy, rows[1].sizes = [None, 50.0], [0, 2]
    found = [[str(cell) for cell in row.cells] for row in history_table(rows).rows]
    assert found == [
        ["1", "learn", "6: a, b, c, d and 2 more", "", "", "", "", "2026-01-02 03:04"],
        ["2", "extend", "1: g", "4", "50.0*", "~81.0 -> 79.5", "0.40", ""],
        ["3", "rename", "g -> the g", "", "", "", "", ""],
    ]
    assert {len(line) for line in found} == {len(TITLES)}
    assert history_table(rows).note == "* on images of a part of its classes only."
    assert history_table(rows[::2]).note == ""
    rows[0].kept_features, rows[1].kept_features = 3, 7
    assert (features_kept(rows), features_kept(rows[:1]), features_kept([])) == (7, 3, 0)
    few = history_table(rows[::2]).filled()
    assert [column.title for column in few.columns] == ["", "what", "classes", "date"]
    assert [str(cell) for cell in few.rows[1].cells] == ["2", "rename", "g -> the g", ""]
