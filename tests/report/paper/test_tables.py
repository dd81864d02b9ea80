"""Our runs in the paper's tables: which runs are accepted, the published numbers, and output formats."""

import csv
import io
import random
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from cofima import report
from cofima.cli.report import Format, Paper
from cofima.cli.report import report as report_command
from cofima.experiment import config
from cofima.experiment.config import paper_settings
from cofima.experiment.grid.cells import cells
from cofima.report import render
from cofima.report.paper import protocol
from cofima.report.paper.layouts import LAYOUTS
from cofima.report.paper.protocol import Placed, place
from cofima.report.paper.published import published
from cofima.report.paper.tables import record, table
from cofima.store.history import HistoryRow
from cofima.store.record import MethodFacts, Record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IMAGES = {"cifar100": (50_000, 10_000), "imagenet_r": (24_000, 6_000), "cub200": (9_430, 2_358)}


@pytest.fixture
def paper_run(tmp_path, write_run):
    """Return a function that writes a run as the recipe of the paper makes it, but for what is given."""

    def make(
        method="cofima",
        seed=1993,
        *changes: str,
        dataset="cifar100",
        backbone="vit_b16_in21k",
        level=90.0,
        name="",
        images=None,
        preset="slca",
        split="a" * 64,
        done=None,
        known=True,
    ) -> Path:
        chosen = [f"dataset={dataset}", f"backbone={backbone}", f"seed={seed}"]
        chosen += [f"method={method}"] if known else []
        values = config.read("table1.yaml", [*chosen, *changes]).model_dump(mode="json")
        train, test = images or IMAGES[dataset]
        chance = random.Random(f"{method} {seed} {dataset} {changes}")
        matrix = [[level - chance.random() for _ in range(t + 1)] for t in range(10)]
        folder = tmp_path / (name or f"{method}-{dataset}-{backbone}-{seed}-{len(list(tmp_path.iterdir()))}")
        return write_run(
            folder,
            method=method,
            seed=seed,
            matrix=matrix,
            tasks=10,
            per_task=10 if dataset == "cifar100" else 20,
            done=done,
            label=method,
            config=values | ({} if known else {"method": method, "options": {"own": 1}}),
            data={
                "name": dataset,
                "train": train,
                "test": test,
                "split_id": f"{dataset}:x",
                "split_hash": split,
                "fingerprint": "f" * 64,
            },
            preprocess={"preset": preset, "size": 224},
            backbone={
                "name": backbone,
                "sha256": ("e" if values["model"]["final_norm"] == "reset" else "d") * 64,
                "final_norm": values["model"]["final_norm"],
            },
        )

    return make


def fill(key, runs):
    return protocol.fill(key, runs, paper_settings)


def whose(row):
    return next(cell.text for cell in row.cells if cell.text in ("here", "paper"))


def heads(row):
    """Return the cells before the one that tells whose numbers they are."""
    return row.cells[: [cell.text for cell in row.cells].index(whose(row))]


def numbers(row):
    return row.cells[len(heads(row)) + 1 :]


def rows_of(filled, said):
    return {row.cells[0].text: row for row in table(filled).rows if whose(row) == said}


def test_every_published_number_stands_in_one_cell():
    cells = {}
    for layout in LAYOUTS.values():
        for line in layout.lines:
            for dataset in layout.datasets:
                for metric in layout.metrics:
                    found = record(line, (dataset, metric), layout.key)
                    if found is None:
                        assert (line.method, metric) == ("joint", "Inc-Acc")
                    else:
                        cells[found.model_dump_json()] = found
    assert len(cells) == len(published().records) == 280
    table1 = {(r.method, r.dataset, r.metric): r.mean for r in published().records if r.table == "1"}
    assert table1["CoFiMA", "CUB-200", "Last-Acc"] == 87.11
    assert table1["Joint-Training", "ImageNet-R", "Last-Acc"] == 79.6


def test_numbers_of_the_text_are_known_by_their_recipes():
    learned = {(c.dataset, c.backbone, c.method) for c in [*cells("backbones.yaml"), *cells("distance.yaml")]}
    learned |= {(dataset, "vit_b16_in21k", method) for dataset, _, method in learned}  # an alias of its name
    for text in published().texts:
        assert (text.dataset, text.backbone, text.method) in learned
    found = {(t.backbone, t.method): t.value for t in published().texts if t.metric == "Last-Acc"}
    assert len(published().texts) == 11
    assert (found["vit_ti16", "cofima"], found["vit_l16", "joint"]) == (82.96, 94.45)


def test_every_disagreement_is_marked_and_explained():
    for key in LAYOUTS:
        shown = table(fill(key, []))
        marks = [c.marks for c in shown.columns] + [c.marks for row in shown.rows for c in row.cells]
        marked = {mark for text in marks for mark in text.split(",") if mark}
        explained = {note[0] for note in shown.footnotes if re.match("[a-z]: ", note)}
        assert marked == explained
        assert len(explained) == sum(key in d.tables for d in published().disagreements)
    coma = rows_of(fill("1", []), "paper")["CoMA"]
    assert numbers(coma)[2].marks == ""  # Cars-196 Last-Acc: the authors' runs agree
    assert numbers(coma)[0].marks == "a"


def test_without_runs_the_table_is_the_paper_s():
    shown = table(fill("1", []))
    assert [row.cells[0].text for row in shown.rows][:2] == ["Joint-Training", "GDumb"]
    assert [row.cells[1].text for row in shown.rows] == ["–", *"✗✗✗", *"✓" * 10]
    assert [row.rule for row in shown.rows].index(True) == 1
    best = [row.cells[0].text for row in shown.rows for cell in row.cells if cell.best]
    assert best == ["CoFiMA"] * 8
    assert "No run here follows the protocol of this table." in shown.footnotes


def test_methods_that_keep_the_norm_stand_beside_those_that_do_not(paper_run):
    folders = [paper_run(method) for method in ("slca", "cofima", "prototype")]
    folders += [paper_run(method) for method in ("ranpac", "l2p", "dual_prompt")]
    filled = fill("1", report.find(folders))
    assert not filled.apart
    assert len(filled.entries) == 6
    notes = " ".join(table(filled).footnotes)
    assert f"backbone sha256 {'d' * 12}, {'e' * 12}" in notes or f"{'e' * 12}, {'d' * 12}" in notes
    other = paper_run("ranpac", 1996, "model.final_norm=reset"), paper_run("ranpac", 1997, split="b" * 64)
    apart = {run.seed: why for run, why in fill("1", report.find([*folders, *other])).apart}
    assert apart[1996] == ["model.final_norm=reset (the recipe has pretrained)"]
    assert len(apart[1997]) == 1
    assert "split" in apart[1997][0]


def test_a_shrunk_covariance_is_the_labeled_variant(paper_run):
    folders = [paper_run("slca"), paper_run("slca", 1993, "options.align.shrink=true")]
    filled = fill("1", report.find(folders))
    assert {entry.label for entry in filled.entries} == {"SLCA", "SLCA (align.shrink=true)"}


def test_our_numbers_stand_above_the_published_ones(paper_run):
    folders = [paper_run(method, seed) for method in ("cofima", "slca") for seed in (1993, 1996, 1997)]
    folders += [paper_run("joint", 1993), paper_run("cofima", 1993, dataset="imagenet_r", level=70.0)]
    runs = report.find(folders)
    filled = fill("1", runs)
    assert not filled.apart
    mine = rows_of(filled, "here")
    last = [report.metrics.last(run.matrix, run.sizes) for run in runs[:3]]
    column = filled.columns.index(("cifar100", "Last-Acc"))
    expected = f"{statistics.fmean(last):.2f} ± {statistics.stdev(last):.2f} (3)"
    assert str(numbers(mine["CoFiMA"])[column]) == expected
    assert str(numbers(mine["CoFiMA"])[column + 2]).endswith(" (1)")
    assert str(numbers(mine["CoFiMA"])[0]) == "–"
    assert str(numbers(mine["Joint-Training"])[column + 1]) == "–"
    bold = [name for name, row in mine.items() if numbers(row)[column].best]
    assert bold in (["CoFiMA"], ["SLCA"])
    names = [(row.cells[0].text, whose(row)) for row in table(filled).rows]
    assert names.index(("CoFiMA", "here")) + 1 == names.index(("CoFiMA", "paper"))
    assert names[0] == ("Joint-Training", "here")


@pytest.mark.parametrize(
    ("how", "changes", "why"),
    [
        ({"images": (40_000, 10_000)}, (), "images 40000 + 10000: the table has 50,000 + 10,000"),
        ({"preset": "timm"}, (), "preset timm: the table has slca"),
        ({}, ("model.final_norm=pretrained",), "model.final_norm=pretrained (the recipe has reset)"),
        ({}, ("stream.increment=5",), "stream.increment=5 (the recipe has 10)"),
        ({}, ("stream.order_seed=7",), "stream.order_seed=7 (the recipe has null)"),
        ({}, ("train.epochs=1", "train.milestones=[]"), "train.epochs=1 (the recipe has 20)"),
        ({}, ("val_fraction=0.2",), "val_fraction=0.2 (the recipe has 0.0)"),
        ({}, ("data.max_train_per_class=5",), "data.max_train_per_class=5 (the recipe has null)"),
        ({"done": 3}, (), "not finished: 3 of 10 tasks"),
        ({"backbone": "vit_b16_mocov3"}, (), "backbone vit_b16_mocov3: the table has vit_b16_in21k"),
        ({}, ("model.pretrained=false",), "the backbone is not pre-trained"),
    ],
)
def test_a_run_of_another_protocol_stands_apart_with_the_difference(paper_run, how, changes, why):
    (run,) = report.find([paper_run("cofima", 1993, *changes, **how)])
    filled = fill("1", [run])
    assert not filled.entries
    ((_, found),) = filled.apart
    assert why in found
    assert any(why in note and note.startswith("Apart: ") for note in table(filled).footnotes)


def test_a_run_on_other_data_stands_apart(make_run):
    filled = fill("1", report.find([make_run("digits")]))
    ((_, why),) = filled.apart
    assert why[0] == "dataset digits: the table has CUB-200, Cars-196, CIFAR-100, ImageNet-R"
    assert why[1].startswith("backbone vit_micro: the table has")


def test_what_only_places_a_run_does_not_matter(paper_run):
    changes = ("data.root=/elsewhere", "device=cpu", "keep_checkpoints=true", "stream.order_seed=1993")
    runs = report.find([paper_run("cofima", 1993, *changes, backbone="vit_base_patch16_224.augreg_in21k")])
    assert len(fill("1", runs).entries) == 1


def test_other_options_have_a_row_of_their_own(paper_run):
    folders = [paper_run("cofima", seed, *more) for seed in (1, 2) for more in ((), ("options.lam=0.5",))]
    mine = rows_of(fill("1", report.find(folders)), "here")
    assert list(mine) == ["CoFiMA", "CoFiMA (lam=0.5)"]
    assert str(numbers(mine["CoFiMA (lam=0.5)"])[4]).endswith("(2)")


def test_runs_on_another_split_are_not_mixed_with_most(paper_run):
    folders = [paper_run("cofima", seed, name=f"most-{seed}") for seed in (1, 2)]
    folders += [paper_run("cofima", 3, split="b" * 64, name="other")]
    filled = fill("1", report.find(folders))
    (entry,) = filled.entries
    assert sorted(entry.values(("cifar100", "Last-Acc"))) == [1, 2]
    ((run, why),) = filled.apart
    assert run.folder.name == "other"
    assert why[0].startswith("not the protocol of most runs: split: ")


def test_both_splits_of_cub_are_the_paper_s_but_not_together(paper_run):
    official = [
        paper_run("cofima", s, dataset="cub200", images=(5_994, 5_794), split="c" * 64) for s in (1, 2)
    ]
    other = paper_run("cofima", 3, dataset="cub200")
    assert not fill("1", report.find(official)).apart
    assert not fill("1", report.find([other])).apart
    assert len(fill("1", report.find([*official, other])).apart) == 1


def test_a_seed_counts_once(paper_run):
    filled = fill("1", report.find([paper_run("slca", 1), paper_run("slca", 1)]))
    assert filled.repeats == 1
    assert filled.entries[0].summary(("cifar100", "Last-Acc")).n == 1


def test_table_3_has_init_and_lambda(paper_run):
    runs = report.find(
        [
            paper_run("weight_ensemble", 1, "options.init=pretrained"),
            paper_run("weight_ensemble", 1, "options.init=previous"),
            paper_run("coma", 1),
            paper_run("ewc", 1),
        ]
    )
    filled = fill("3", runs)
    here = [[cell.text for cell in heads(row)] for row in table(filled).rows if whose(row) == "here"]
    assert here == [
        ["Weight-Ensemble", "θ_0", "1/t"],
        ["Weight-Ensemble", "θ*_{t−1}", "1/t"],
        ["CoMA", "θ*_{t−1}", "0.4"],
    ]
    assert filled.elsewhere == 1  # EWC is in Table 1


def test_table_2_is_of_moco_with_its_own_schedule(paper_run):
    (run,) = report.find([paper_run("cofima", 1, backbone="vit_b16_mocov3")])
    assert run.config["train"]["epochs"] == 90
    assert len(fill("2", [run]).entries) == 1
    assert "L2P" not in rows_of(fill("2", []), "paper")


def test_the_table_of_scratch_tells_starts_and_backbones_apart(paper_run):
    runs = report.find(
        [
            paper_run("cofima", 1, "model.pretrained=false", "train.lr=0.1", backbone="resnet18", level=40.0),
            paper_run("cofima", 1, backbone="resnet18", level=70.0),
            paper_run("joint", 1, backbone="vit_ti16", level=80.0),
        ]
    )
    filled = fill("scratch", runs)
    assert not filled.apart
    here = [[cell.text for cell in heads(row)] for row in table(filled).rows if whose(row) == "here"]
    assert here[0][1:] == ["ResNet18", "scratch"]
    assert "train.lr=0.1" in here[0][0]
    assert here[1] == ["CoFiMA", "ResNet18", "pre-trained"]
    assert here[2] == ["Joint-Training", "ViT-Tiny/16", "pre-trained"]
    assert not any(cell.best for row in table(filled).rows for cell in row.cells)


def test_a_method_of_one_s_own_stands_below_the_paper_s(paper_run):
    filled = fill("1", report.find([paper_run("mine", 1, known=False), paper_run("ranpac", 1)]))
    rows = table(filled).rows
    assert (rows[-1].cells[0].text, whose(rows[-1])) == ("mine (own=1)", "here")
    assert rows[-1].rule


def test_versions_of_a_plugin_are_not_one_method(paper_run, make_run, edit_run):
    def with_code(folder, digest):
        plugins = [{"name": "mine", "sha256": digest * 64}]
        return edit_run(folder, lambda content, _: content.update(plugins=plugins))

    folders = [with_code(paper_run("mine", seed, known=False), digest) for seed, digest in enumerate("aab")]
    mine = rows_of(fill("1", report.find(folders)), "here")
    assert sorted(mine) == [f"mine (own=1, plugin={digest * 12})" for digest in "ab"]
    assert str(numbers(mine[f"mine (own=1, plugin={'a' * 12})"])[4]).endswith("(2)")
    assert list(rows_of(fill("1", report.find(folders[:2])), "here")) == ["mine (own=1)"]
    alone = [with_code(make_run(d, method="coma", seed=s), d) for s, d in enumerate("ab")]
    (comparison,) = report.compare(report.find(alone))
    assert sorted(group.label for group in comparison.groups) == [f"CoMA (plugin={d * 12})" for d in "ab"]


def test_csv_has_every_number_with_its_source(paper_run):
    filled = fill("1", report.find([paper_run("slca", seed) for seed in (1, 2)]))
    lines = list(csv.DictReader(io.StringIO(render.csv_text([table(filled)]))))
    assert len(lines) == 108
    (line,) = [
        r for r in lines if (r["method"], r["dataset"], r["metric"]) == ("slca", "CIFAR-100", "Last-Acc")
    ]
    value = filled.entries[0].summary(("cifar100", "Last-Acc"))
    assert (float(line["mean"]), float(line["std"]), line["n"], line["seeds"]) == (
        value.mean,
        value.std,
        "2",
        "1 2",
    )
    assert (float(line["published_mean"]), float(line["published_std"])) == (91.53, 0.28)
    assert line["published_source"].endswith("arXiv 2312.08977, Table 1")
    assert [r for r in lines if r["mean"] == "" and r["method"] == "cofima"]


@pytest.fixture
def tables(paper_run, make_run):
    """Return all tables of the paper with some runs in them, and one that stands apart."""
    folders = [paper_run(method, seed) for method in ("cofima", "slca", "coma") for seed in (1, 2, 3)]
    folders += [paper_run("joint", 1), make_run("digits & co_1")]
    return report.find(folders)


def test_markdown_is_one_table_for_each(tables):
    text = report.paper_texts(tables, ["1", "2", "3", "scratch"], paper_settings, "slca", ["md"])["tables.md"]
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1
    assert len(re.findall("^## ", text, re.MULTILINE)) == 6  # four tables, two of them with tests


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on PATH")
def test_latex_compiles(tables, tmp_path):
    text = report.paper_texts(tables, ["1", "2", "3", "scratch"], paper_settings, "best", ["tex"])[
        "tables.tex"
    ]
    uses = "".join(f"\\usepackage{{{name}}}" for name in ("booktabs", "graphicx", "amssymb"))
    whole = f"\\documentclass{{article}}{uses}\\begin{{document}}\n{text}\\end{{document}}\n"
    (tmp_path / "paper.tex").write_text(whole, "utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").is_file()


def test_latex_has_as_many_cells_as_columns(tables):
    text = report.paper_texts(tables, ["1", "3"], paper_settings, forms=["tex"])["tables.tex"]
    for columns, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        spans = [
            1 + line.count(" & ") + sum(int(n) - 1 for n in re.findall(r"multicolumn\{(\d)", line))
            for line in rows
        ]
        assert set(spans) == {len(columns)}
    assert not re.search(r"[^\x00-\x7f]", text.replace("λ", ""))
    for opening, closing in ("{}", ("\\begin", "\\end")):
        assert text.count(opening) - text.count(f"\\{opening}") == text.count(closing) - text.count(
            f"\\{closing}"
        )


def test_the_command_prints_one_form_and_writes_all(tables, tmp_path, capsys):
    folders = [run.folder for run in tables]
    report_command(folders, tables=[Paper.one], formats=[Format.csv])
    assert capsys.readouterr().out.startswith("table,method,label")
    report_command(folders, folder=tmp_path / "out", tables=[Paper.one], against="slca")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*(f"table-1.{form}" for form in ("md", "csv", "tex", "html")), "table-1-tests.csv"}
    report_command(folders, folder=tmp_path / "one", tables=[Paper.two], formats=[Format.tex])
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["table-2.tex"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_the_page_opens_offline_at_every_width(tables, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    text = report.paper_texts(tables, ["1", "3"], paper_settings, "slca", ["html"])["tables.html"]
    (tmp_path / "tables.html").write_text(text, "utf-8")
    asked = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for width in (1280, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("request", lambda request: asked.append(request.url))
            page.goto(f"file://{tmp_path}/tables.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            figures = page.locator("svg").all()
            assert len(figures) > 3
            assert all(figure.bounding_box()["height"] > 100 for figure in figures)
            wide = page.locator(".scroll").first.evaluate("box => [box.scrollWidth, box.clientWidth]")
            assert wide[1] <= width
            assert wide[0] == wide[1] or width < 1280  # no column is cut off on a common screen
            assert page.locator("table.paper").count() == 2
            page.screenshot(path=tmp_path / f"{width}.png", full_page=True)
        browser.close()
    assert set(asked) == {f"file://{tmp_path}/tables.html"}


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        pytest.param("table1.yaml", "1", marks=pytest.mark.slow),
        pytest.param("table2.yaml", "2", marks=pytest.mark.slow),
        ("table3.yaml", "3"),
        ("scratch.yaml", "scratch"),
    ],
)
def test_every_cell_of_the_recipes_has_its_line(recipe, key):
    images = IMAGES | {"cars196": (8_144, 8_041)}
    lines = set()
    for cell in cells(recipe, only=["seed=1993"]):
        train, test = images[cell.dataset]
        made = Record(
            backbone={},
            tasks=[],
            method=MethodFacts(label=cell.method),
            config=cell.model_dump(mode="json"),
            data={"name": cell.dataset, "train": train, "test": test},
            preprocess={"preset": "slca"},
            planned_tasks=1,
        )
        step = HistoryRow(kind="task", task=1, classes=["a"], accuracy=[90.0], sizes=[10])
        found = place(report.Run(Path(), Path(), made, [step]), LAYOUTS[key], paper_settings)
        assert isinstance(found, Placed), found
        lines.add(found.line)
        rates = cell.train.backbone_lr_scale == 1.0
        assert len(found.settings) == rates  # only what the paper does not state differs
    assert lines == set(LAYOUTS[key].lines)
