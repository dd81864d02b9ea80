"""Paired tests over seeds, against scipy and against slow definitions."""

import random

import pytest
from scipy import stats

from cofima import report
from cofima.core.errors import CofimaError
from cofima.report import significance
from cofima.report.significance import against, holm, paired, table_of_tests


def test_the_test_is_scipy_s_over_common_seeds():
    mine = {1993: 80.0, 1996: 82.5, 1997: 81.0, 5: 10.0}
    other = {1997: 79.0, 1993: 79.5, 1996: 80.0, 7: 99.0}
    found = paired(mine, other)
    expected = stats.ttest_rel([80.0, 82.5, 81.0], [79.5, 80.0, 79.0])
    assert found.p == pytest.approx(expected.pvalue)
    assert found.difference == pytest.approx((0.5 + 2.5 + 2.0) / 3)
    assert found.n == 3


@pytest.mark.parametrize(
    ("mine", "other", "n", "reason"),
    [
        ({1: 80.0}, {2: 79.0}, 0, "no common seed"),
        ({1: 80.0, 3: 81.0}, {1: 79.0}, 1, "a spread needs two"),
        ({1: 80.0, 2: 81.0}, {1: 79.0, 2: 80.0}, 2, "the same difference at every seed"),
    ],
)
def test_what_cannot_be_tested_has_a_reason_and_no_p(mine, other, n, reason):
    found = paired(mine, other)
    assert (found.n, found.p) == (n, None)
    assert reason in found.reason


def slow_holm(values):
    """Step down by the definition: the i-th smallest of m is multiplied by m - i + 1, and never falls."""
    result = []
    for value in values:
        below = sorted(v for v in values if v <= value)
        result.append(max(min(1.0, (len(values) - i) * v) for i, v in enumerate(below)))
    return result


def test_the_correction_is_holm_s():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    chance = random.Random(0)
    for size in range(8):
        values = [chance.random() for _ in range(size)]
        assert holm(values) == pytest.approx(slow_holm(values))


def test_every_row_is_tested_and_corrected_together():
    chance = random.Random(1)
    rows = {name: {s: chance.gauss(80, 1) for s in range(5)} for name in "abcd"}
    found = against(rows, "a")
    raw = [stats.ttest_rel(list(rows[n].values()), list(rows["a"].values())).pvalue for n in "bcd"]
    assert [found[n].p for n in "bcd"] == pytest.approx(slow_holm(raw))


def shown(table):
    return [[str(cell) for cell in row.cells] for row in table.rows]


def test_the_reference_is_found_by_method_label_or_rank():
    rows = {"SLCA": {"Last": {1: 80.0, 2: 81.0}}, "CoMA": {"Last": {1: 82.0, 2: 84.0}}}
    known = {"SLCA": "slca", "CoMA": "coma"}
    by_name = shown(table_of_tests("t", rows, known, "slca"))
    assert by_name == shown(table_of_tests("t", rows, known, "SLCA"))
    assert by_name[0] == ["SLCA", "reference"]
    assert by_name[1][1].startswith("+2.50, p = 0.")
    assert by_name[1][1].endswith("(2)")
    assert shown(table_of_tests("t", rows, known, "best"))[1] == ["CoMA", "reference"]
    with pytest.raises(CofimaError, match="no such row; did you mean 'slca'"):
        table_of_tests("t", rows, known, "slcaa")
    with pytest.raises(CofimaError, match="several rows are; give one of: SLCA, SLCA 2"):
        table_of_tests("t", rows | {"SLCA 2": rows["SLCA"]}, known | {"SLCA 2": "slca"}, "slca")


def test_a_report_has_tests_where_asked_for(make_run):
    folders = [make_run(f"{m}-{s}", method=m, seed=s) for m in ("slca", "coma", "joint") for s in (1, 2, 3)]
    folders += [make_run("alone", method="cofima", seed=1)]
    runs = report.find(folders)
    (comparison,) = report.compare(runs)
    found = significance.tests(comparison, "slca")
    assert [row[0] for row in shown(found)] == [
        group.label for group in comparison.groups if not group.all_at_once
    ]
    (coma,) = [row for row in shown(found) if row[0] == "CoMA"]
    by_label = {group.label: group for group in comparison.groups}
    mine, other = (
        [report.metrics.last(r.matrix, r.sizes) for r in by_label[n].runs] for n in ("CoMA", "SLCA")
    )
    p = stats.ttest_rel(mine, other).pvalue
    assert coma[1] == f"{sum(a - b for a, b in zip(mine, other, strict=True)) / 3:+.2f}, p = {p:.3f} (3)"
    assert "one common seed" in found.note
    texts = report.texts(runs, against="slca")
    assert "## Tests: " in texts["report.md"]
    assert "Tests: " in texts["report.html"]
    assert "tests.csv" in texts
    assert "Tests: " not in report.texts(runs, forms=["md"])["report.md"]
