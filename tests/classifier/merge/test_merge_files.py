"""Plain files: laws of every method, types, mistakes."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import cofima
from cofima.classifier.merge import tensors
from cofima.core.errors import CofimaError
from cofima.core.progress import Progress
from cofima.weights import average, average_all, fisher_average, fisher_average_all


def merged(models: list[Path], method: str = "average", **how: object) -> dict[str, torch.Tensor]:
    out = models[0].parent / "out.safetensors"
    cofima.merge(models, out, method, force=True, **how)  # type: ignore[arg-type]
    return load_file(out)


@pytest.fixture(params=[4, 2**17], ids=["spans", "whole"], autouse=True)
def _span(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on how a tensor is cut."""
    monkeypatch.setattr(tensors, "SPAN", request.param)
    monkeypatch.setattr(tensors, "LONGER", 1)


@pytest.mark.parametrize("method", ["average", "fisher", "wise_ft"])
@pytest.mark.parametrize("lam", [0, 1])
def test_the_ends_are_the_models_bit_for_bit(method: str, lam: int, files, fishers, same_bits) -> None:
    given = {"fisher": fishers[:2]} if method == "fisher" else {}
    found, end, b = merged(files[:2], method, lam=lam, **given), load_file(files[lam]), load_file(files[1])
    integers = {key: value for key, value in b.items() if not value.is_floating_point()}
    same_bits(found, end | integers)  # integers come from the last model


@pytest.mark.parametrize("lam", [None, 0.5, 0.123])
def test_two_models_are_averaged_as_the_function_does(lam: float | None, files, same_bits) -> None:
    a, b = (load_file(path) for path in files[:2])
    same_bits(merged(files[:2], lam=lam), average(a, b, 0.5 if lam is None else lam))


def test_by_fisher_as_the_function_does(files, fishers, same_bits) -> None:
    a, b = (load_file(path) for path in files[:2])
    f, g = (load_file(path) for path in fishers[:2])
    same_bits(merged(files[:2], "fisher", lam=0.3, fisher=fishers[:2]), fisher_average(a, b, f, g, 0.3))


def test_three_models_equal_and_weighted(files, fishers, same_bits) -> None:
    models, known = [load_file(path) for path in files[:3]], [load_file(path) for path in fishers]
    same_bits(merged(files[:3]), average_all(models))
    third = merged(files[:3], weights=[1 / 3, 1 / 3, 1 / 3])
    torch.testing.assert_close(third["double"], sum(m["double"] for m in models) / 3)
    same_bits(merged(files[:3], weights=[2, 1, 0]), average_all(models, [2, 1, 0]))
    same_bits(merged(files[:3], "fisher", fisher=fishers), fisher_average_all(models, known))
    weighted = merged(files[:3], "fisher", fisher=fishers, weights=[0.2, 0.3, 0.5])
    same_bits(weighted, fisher_average_all(models, known, [0.2, 0.3, 0.5]))
    one = merged(files[:3], weights=[0, 1, 0])
    same_bits(
        {k: v for k, v in one.items() if v.is_floating_point()},
        {k: models[1][k] for k in one if one[k].is_floating_point()},
    )


def test_equal_fisher_is_the_average(files, tmp_path: Path) -> None:
    same = {key: torch.full(v.shape, 0.7) for key, v in load_file(files[0]).items() if v.is_floating_point()}
    save_file(same, tmp_path / "same.safetensors")
    both = [tmp_path / "same.safetensors"] * 2
    torch.testing.assert_close(merged(files[:2], "fisher", lam=0.3, fisher=both), merged(files[:2], lam=0.3))


def test_weights_are_lam_said_otherwise(files, fishers) -> None:
    torch.testing.assert_close(merged(files[:2], weights=[7, 3]), merged(files[:2], lam=0.3))
    by = {"fisher": fishers[:2]}
    torch.testing.assert_close(
        merged(files[:2], "fisher", weights=[7, 3], **by), merged(files[:2], "fisher", lam=0.3, **by)
    )


def test_wise_ft_is_an_average_with_the_base(files, same_bits) -> None:
    a, _, _, base = files
    same_bits(merged([a], "wise_ft", base=base, lam=1), load_file(a))
    same_bits(merged([a], "wise_ft", base=base), average(load_file(base), load_file(a), 0.5))
    same_bits(merged([base, a], "wise_ft", lam=0.2), merged([a], "wise_ft", base=base, lam=0.2))


def test_task_arithmetic(files, same_bits) -> None:
    a, b, c, base = files
    same_bits(merged([a], "task_arithmetic", base=base, lam=1), load_file(a))
    start, one, two, three = (load_file(path) for path in (base, a, b, c))
    for how, scales in (
        ({}, (0.4,) * 3),
        ({"lam": 0.2}, (0.2,) * 3),
        ({"weights": [0.5, -1, 0]}, (0.5, -1, 0)),
    ):
        found = merged([a, b, c], "task_arithmetic", base=base, **how)
        for key in ("a.weight", "double", "scalar"):
            vectors = sum(
                s * (m[key].double() - start[key]) for s, m in zip(scales, (one, two, three), strict=True)
            )
            torch.testing.assert_close(found[key], (start[key] + vectors).to(found[key].dtype))
        assert found["count"] == 2


def test_ties_with_everything_kept_and_one_model_is_task_arithmetic(files, same_bits) -> None:
    a, _, _, base = files
    for lam in (1.0, 0.4):
        kept = merged([a], "ties", base=base, density=1, lam=lam)
        same_bits(kept, merged([a], "task_arithmetic", base=base, lam=lam))


def test_ties_trims_over_all_tensors_together(files) -> None:
    a, _, _, base = files
    model, start = load_file(a), load_file(base)
    floats = [key for key in model if model[key].is_floating_point()]
    moved = torch.cat([(model[key].double() - start[key].double()).flatten().abs().float() for key in floats])
    least = moved.sort(descending=True).values[int(0.3 * len(moved)) - 1]
    found = merged([a], "ties", base=base, density=0.3)
    for key in floats:
        far = (model[key].double() - start[key].double()).abs().float() >= least
        assert torch.equal(found[key], torch.where(far, model[key], start[key])), key


FLOATS = ("a.weight", "a.bias", "double", "scalar")


def vectors_of(files, key: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    *models, base = (load_file(path)[key].double() for path in files)
    return base, [model - base for model in models]


def test_magmax_of_files(files, same_bits) -> None:
    *models, base = files
    found = merged(models, "magmax", base=base)
    for key in FLOATS:
        start, vectors = vectors_of(files, key)
        stack = torch.stack(vectors)
        largest = stack.gather(0, stack.abs().argmax(0, keepdim=True))[0]
        torch.testing.assert_close(found[key], (start + 0.5 * largest).to(found[key].dtype))
    same_bits(merged([models[0]], "magmax", base=base, lam=0.0) | integers(base), load_file(base))


def integers(path: Path) -> dict[str, torch.Tensor]:
    return {key: value for key, value in load_file(path).items() if not value.is_floating_point()}


def test_model_stock_is_made_layer_by_layer(files) -> None:
    *models, base = files
    found = merged(models, "model_stock", base=base)
    for key in FLOATS:
        start, vectors = vectors_of(files, key)
        flat = torch.nn.functional.normalize(torch.stack([v.flatten() for v in vectors]))
        cosine = float(((flat @ flat.T).sum() - 3) / 6)
        share = 3 * max(cosine, 0) / (1 + 2 * max(cosine, 0))
        mean = torch.stack(vectors).mean(0)
        torch.testing.assert_close(found[key], (start + share * mean).to(found[key].dtype))


def test_breadcrumbs_are_found_layer_by_layer(files) -> None:
    *models, base = files
    found = merged(models, "breadcrumbs", base=base, density=0.3, outliers=0.2, lam=0.5)
    for key in FLOATS:
        start, vectors = vectors_of(files, key)
        expected = start.clone().flatten()
        for vector in (v.flatten() for v in vectors):
            order = vector.abs().argsort(descending=True)
            dropped = int(0.2 * len(vector))
            kept = order[dropped : dropped + max(1, int(0.3 * len(vector)))]
            expected[kept] += 0.5 * vector[kept]
        torch.testing.assert_close(found[key], expected.view(start.shape).to(found[key].dtype))


def test_dare_is_the_same_again_and_another_with_another_seed(files, same_bits) -> None:
    *models, base = files
    first = merged(models, "dare", base=base, density=0.5)
    same_bits(merged(models, "dare", base=base, density=0.5, seed=0), first)
    other = merged(models, "dare", base=base, density=0.5, seed=1)
    assert not torch.equal(other["a.weight"], first["a.weight"])
    whole = merged(models, "dare", base=base, density=1)
    torch.testing.assert_close(whole, merged(models, "task_arithmetic", base=base))
    (alone,) = {float(v) for v in (merged(models[:1], "dare", base=base, density=0.5, lam=1.0)["scalar"],)}
    start, end = float(load_file(base)["scalar"]), float(load_file(models[0])["scalar"])
    assert min(abs(alone - start), abs(alone - (2 * end - start))) < 1e-5  # dropped, or doubled


def test_dare_does_not_depend_on_spans(files, monkeypatch: pytest.MonkeyPatch, same_bits) -> None:
    *models, base = files
    first = merged(models, "dare", base=base, density=0.5)
    monkeypatch.setattr(tensors, "SPAN", 7)
    same_bits(merged(models, "dare", base=base, density=0.5), first)


def test_dare_keeps_the_sum_on_average(tmp_path: Path) -> None:
    base, model = torch.zeros(20_000), torch.ones(20_000)
    for name, value in (("base", base), ("model", model)):
        save_file({"w": value}, tmp_path / f"{name}.safetensors")
    found = merged(
        [tmp_path / "model.safetensors"], "dare", base=tmp_path / "base.safetensors", density=0.1, lam=1.0
    )["w"]
    torch.testing.assert_close(found.unique(), torch.tensor([0.0, 10.0]))
    assert float(found.mean()) == pytest.approx(1, abs=0.1)


def test_metadata_is_kept_and_the_wider_type_is_taken(files, tmp_path: Path) -> None:
    wide = load_file(files[1]) | {"half": torch.randn(3, 4)}
    save_file(wide, tmp_path / "wide.safetensors", {"name": "wide"})
    pair = [files[0], tmp_path / "wide.safetensors"]
    assert merged(pair, lam=0)["half"].dtype == torch.float32
    assert torch.equal(merged(pair, lam=0)["half"], load_file(files[0])["half"].float())
    assert torch.equal(merged(pair[::-1], lam=0)["half"], wide["half"])
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "name": "a"}


class Ears(Progress):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.ticks: dict[str, tuple[int, int]] = {}

    def say(self, message: str) -> None:
        self.heard.append(message)

    def track(self, items, total, label):  # type: ignore[no-untyped-def]
        for count, item in enumerate(items, start=1):
            yield item
            self.ticks[label] = (count, total)


def test_sizes_are_said_first_and_the_bar_counts_megabytes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tensors, "SPAN", 100_000)
    paths = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    for path in paths:
        save_file({f"k{i}": torch.randn(150_000) for i in range(4)}, path)
    ears = Ears()
    done = cofima.merge(paths, tmp_path / "out.safetensors", progress=ears)
    assert done.bytes == 2_400_000
    assert ears.heard == ["merging 2 models of 2.4 MB: average, lam 0.5"]
    assert ears.ticks == {"checking, MB": (5, 5), "merging, MB": (3, 3)}


@pytest.mark.parametrize("name", ["x.pth", "x.pth.tar", "x.pt", "x.bin"])
def test_files_of_torch_are_read_as_everywhere_else(name: str, files, tmp_path: Path, same_bits) -> None:
    wrapped = {f"module.{key}": value for key, value in load_file(files[1]).items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, tmp_path / name)
    same_bits(merged([files[0], tmp_path / name], lam=0.3), merged(files[:2], lam=0.3))


def test_old_files_of_torch(files, tmp_path: Path, same_bits) -> None:
    torch.save(load_file(files[1]), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    same_bits(merged([files[0], tmp_path / "old.pth"], lam=0.3), merged(files[:2], lam=0.3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["a.weight", "half", "brain", "double", "scalar"])
def test_nan_and_inf_are_named(value: float, key: str, files) -> None:
    broken = load_file(files[1])
    broken[key].view(-1)[-1] = value
    save_file(broken, files[1])
    assert f"b.safetensors: {key} holds NaN or Inf" in refused(files[:2])
    assert f"b.safetensors: {key} holds NaN or Inf" in refused(files[:1], method="ties", base=files[1])


# --- heads for different classes -------------------------------------------------------------------

NAMES = {"a": ["cat", "dog", "fox"], "b": ["fox", "cat", "owl", "emu"]}


@pytest.fixture
def heads(tmp_path: Path) -> list[Path]:
    """Return two files with one body and heads for NAMES, and their lists of classes."""
    draw = torch.Generator().manual_seed(0)
    for name, classes in NAMES.items():
        rows = {"fc.weight": torch.randn(len(classes), 5, generator=draw)}
        rows |= {"fc.bias": torch.randn(len(classes), generator=draw)}
        rows |= {"body.weight": torch.randn(5, 5, generator=draw)}
        save_file(rows, tmp_path / f"{name}.safetensors", {"cofima.method": "CoMA"})
        (tmp_path / f"{name}.txt").write_text("\n".join(classes) + "\n\n")
    return [tmp_path / name for name in ("a.safetensors", "b.safetensors", "a.txt", "b.txt")]


def test_skipped_tensors_are_left_out(heads, same_bits) -> None:
    a, b = load_file(heads[0]), load_file(heads[1])
    body = average({"body.weight": a["body.weight"]}, {"body.weight": b["body.weight"]}, 0.5)
    same_bits(merged(heads[:2], skip=["fc.*"]), body)
    assert "--skip 'fc.*' leaves tensors out" in refused(heads[:2])
    said = refused(heads[:2], skip=["fc.*", "head.*"])
    assert said == "skip = head.*: no tensor has such a name, of body.*, fc.*"


def test_fisher_information_of_skipped_tensors_is_not_needed(heads, tmp_path: Path) -> None:
    for path in heads[:2]:
        save_file({k: torch.rand(v.shape) for k, v in load_file(path).items()}, tmp_path / f"f{path.name}")
    fishers = [tmp_path / f"f{path.name}" for path in heads[:2]]
    assert set(merged(heads[:2], "fisher", fisher=fishers, skip=["fc.*"])) == {"body.weight"}


def test_heads_of_files_are_merged_by_a_class_list(heads) -> None:
    done = cofima.merge(heads[:2], heads[0].parent / "out.safetensors", lam=0.3, classes=heads[2:])
    assert done.classes == ["cat", "dog", "fox", "owl", "emu"]
    found, a, b = (load_file(path) for path in (done.path, *heads[:2]))
    for row, name in enumerate(done.classes):
        mine = [
            (m, NAMES[k].index(name), s) for k, m, s in (("a", a, 0.7), ("b", b, 0.3)) if name in NAMES[k]
        ]
        total = sum(share for *_, share in mine)
        for key in ("fc.weight", "fc.bias"):
            expected = sum(share / total * model[key][at] for model, at, share in mine)
            torch.testing.assert_close(found[key][row], expected)
    with safe_open(done.path, "pt") as file:
        assert file.metadata() == {"cofima.classes": '["cat", "dog", "fox", "owl", "emu"]'}


def test_files_that_name_their_classes_need_no_list(heads, tmp_path: Path, same_bits) -> None:
    by_list = merged(heads[:2], classes=heads[2:])
    for path, names in zip(heads[:2], NAMES.values(), strict=True):
        save_file(load_file(path), path, {"cofima.classes": json.dumps(names)})
    same_bits(merged(heads[:2]), by_list)


def test_the_base_of_named_heads_gives_its_body_alone(heads, tmp_path: Path, same_bits) -> None:
    base = tmp_path / "base.safetensors"
    save_file({"body.weight": torch.zeros(5, 5), "fc.weight": torch.zeros(1000, 5)}, base)
    found = merged(heads[:2], "task_arithmetic", base=base, lam=0.5, classes=heads[2:])
    torch.testing.assert_close(found["fc.weight"], merged(heads[:2], classes=heads[2:])["fc.weight"])
    alone = merged(heads[:1], "wise_ft", base=base, lam=0.5, classes=heads[2:3])
    same_bits({"fc": alone["fc.weight"]}, {"fc": load_file(heads[0])["fc.weight"]})


def test_class_lists_that_do_not_fit(heads, tmp_path: Path) -> None:
    a, b, one, other = heads
    assert "1 lists for 2 models" in refused([a, b], classes=[one])
    assert "none does" in refused([a, b], classes=[other, one])
    assert "fc has 3 rows for 4 classes" in refused([a, b], classes=[other, other], head="fc")
    assert "head: only with classes" in refused([a, b], head="fc")
    (tmp_path / "five.txt").write_text("1\n2\n3\n4\n5")
    save_file(load_file(a) | {"last.weight": torch.zeros(5, 5)}, a)
    assert "several do: body, last; give --head NAME" in refused([a, a], classes=[tmp_path / "five.txt"] * 2)
    one.write_text("x\nx")
    assert "class x stands there twice" in refused([a, b], classes=[one, other])


# --- mistakes --------------------------------------------------------------------------------------


def refused(models: list[Path], out: Path | None = None, method: str = "average", **how: object) -> str:
    """Return what a merge says that must not begin; nothing may change."""
    folder = models[0].parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(CofimaError) as said:
        cofima.merge(models, out or folder / "new.safetensors", method, **how)  # type: ignore[arg-type]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    return str(said.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"method": "averag"}, "did you mean 'average'?"),
        ({"lam": 1.5}, "lam = 1.5: must lie between 0 and 1"),
        ({"lam": float("nan")}, "lam = nan"),
        ({"method": "ties", "lam": float("inf")}, "lam = inf: must be finite"),
        ({"lam": 0.5, "weights": [1, 1]}, "lam and weights: give one of them"),
        ({"weights": [1]}, "1 for 2 models"),
        ({"weights": [1, -1]}, "must not be negative"),
        ({"weights": [0, 0]}, "nor all 0"),
        ({"weights": [float("nan"), 1]}, "must be finite"),
        ({"method": "fisher"}, "needs --fisher with one file a model"),
        ({"method": "task_arithmetic"}, "needs --base"),
        ({"method": "ties"}, "needs --base"),
        ({"method": "ties", "density": 0}, "density = 0: must be above 0"),
        ({"density": 0.5}, "only for method ties and breadcrumbs and dare"),
        ({"outliers": 0.1}, "only for method breadcrumbs"),
        ({"method": "ties", "outliers": 0.1}, "only for method breadcrumbs"),
        ({"method": "breadcrumbs", "seed": 3}, "seed = 3: only for method dare"),
        ({"method": "breadcrumbs", "outliers": 1.0}, "must be at least 0 and below 1"),
        ({"method": "breadcrumbs", "outliers": 0.5, "density": 0.6}, "more than the whole vector"),
        ({"method": "magmax"}, "needs --base"),
        ({"method": "magmax", "weights": [1, 2]}, "not for method magmax"),
        ({"method": "magmax", "density": 0.5}, "only for method ties"),
        ({"method": "model_stock", "lam": 0.5}, "not for method model_stock, which finds its own share"),
        ({"method": "model_stock", "weights": [1, 2]}, "not for method model_stock"),
        ({"method": "dare", "lam": 0.5, "weights": [1, 1]}, "lam and weights: give one of them"),
    ],
)
def test_a_wrong_wish_is_refused(how: dict, message: str, files) -> None:
    assert message in refused(files[:2], **how)


def test_wrong_numbers_of_models_and_things_that_do_not_belong(files, fishers) -> None:
    assert "needs two models or more, got 1" in refused(files[:1])
    assert "needs the base and one model" in refused(files[:3], method="wise_ft")
    assert "needs the base and one model" in refused(files[:2], method="wise_ft", base=files[3])
    assert "not for method average" in refused(files[:2], base=files[3])
    assert "only for method fisher" in refused(files[:2], fisher=fishers[:2])
    assert "is for two models; give weights" in refused(files[:3], lam=0.4)
    assert "model_stock: needs two models or more" in refused(files[:1], method="model_stock", base=files[3])
    assert "not for method wise_ft" in refused(files[:2], method="wise_ft", weights=[1, 2])


def test_every_mistake_is_told_at_once(files, tmp_path: Path) -> None:
    said = refused(
        [files[0], tmp_path / "none.safetensors"], files[0], "fisher", lam=7, fisher=[tmp_path / "f"]
    )
    assert "5 problems" in said
    for part in (
        "lam = 7",
        "one file a model",
        "none.safetensors: no such",
        "/f: no such",
        "would overwrite",
    ):
        assert part in said


def test_inputs_are_never_overwritten_and_existing_files_only_if_told(files, fishers, tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(files[0])
    assert "would overwrite" in refused(files[:2], files[1], force=True)
    assert "would overwrite" in refused(files[:2], link, force=True)
    assert "would overwrite" in refused(files[:2], fishers[0], "fisher", fisher=fishers[:2], force=True)
    assert "would overwrite" in refused(files[:1], files[3], "ties", base=files[3], force=True)
    assert "exists; give another place, or --force" in refused(files[:2], files[2])
    assert "must end in .safetensors" in refused(files[:2], tmp_path / "out.pth")
    (tmp_path / "dir.safetensors").mkdir()
    assert "is not a file; it is left alone" in refused(files[:2], tmp_path / "dir.safetensors", force=True)
    assert "is not a folder" in refused(files[:2], files[2] / "out.safetensors")


def test_foreign_files_are_told_with_every_difference(files, tmp_path: Path) -> None:
    other = load_file(files[1])
    other["a.weight"] = torch.randn(8, 5)
    other["count"] = torch.tensor(1.0)
    other["new"] = other.pop("a.bias")
    save_file(other, tmp_path / "other.safetensors")
    said = refused([files[0], tmp_path / "other.safetensors"])
    assert "4 problems" in said
    for part in ("a.weight: [7, 5] and [8, 5]", "a.bias: only in", "new: only in", "count: torch.int64"):
        assert part in said
    save_file({f"k{i}": torch.zeros(1) for i in range(50)}, tmp_path / "many.safetensors")
    assert "... and 40 more" in refused([files[0], tmp_path / "many.safetensors"])


def test_truncated_foreign_and_complex_files(files, tmp_path: Path) -> None:
    cut, pth, code = tmp_path / "cut.safetensors", tmp_path / "x.pth", tmp_path / "code.pth.tar"
    cut.write_bytes(files[0].read_bytes()[:-5])
    torch.save({"a": torch.zeros(1)}, pth)
    pth.write_bytes(pth.read_bytes()[:-5])
    torch.save({"state_dict": {"a": torch.zeros(1)}, "args": Path("x")}, code)
    said = refused([cut, pth, code])
    assert "cut.safetensors: truncated" in said
    assert "x.pth: truncated" in said
    assert "code.pth.tar: holds more than tensors" in said
    (tmp_path / "x.npz").touch()
    assert "x.npz: not a .safetensors file" in refused([tmp_path / "x.npz"] * 2)
    save_file({"x": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "z.safetensors")
    assert "types that cannot be merged" in refused([tmp_path / "z.safetensors"] * 2)


def test_fisher_files_that_do_not_fit(files, fishers, tmp_path: Path) -> None:
    def pair(change: dict[str, torch.Tensor]) -> list[Path]:
        save_file(change, tmp_path / "changed.safetensors")
        return [fishers[0], tmp_path / "changed.safetensors"]

    good = load_file(fishers[1])
    said = refused(
        files[:2], method="fisher", fisher=pair(good | {"a.bias": torch.ones(3), "alien": torch.ones(1)})
    )
    assert "a.bias is [3]" in said
    assert "alien is not in" in said
    less = {key: value for key, value in good.items() if key != "half"}
    assert "has nothing for half" in refused(files[:2], method="fisher", fisher=pair(less))
    assert "has no tensors" in refused(files[:2], method="fisher", fisher=[pair({})[1]] * 2)
    negative = good | {"a.bias": -good["a.bias"]}
    assert "Fisher of 'a.bias' must be finite" in refused(files[:2], method="fisher", fisher=pair(negative))


def test_weights_without_fisher_are_named(files, fishers, tmp_path: Path) -> None:
    done = cofima.merge(files[:2], tmp_path / "o.safetensors", "fisher", fisher=fishers[:2])
    assert done.notes == ["1 tensors have no Fisher information and are averaged plainly: double"]


def test_a_full_disk_is_said_before_and_during(files, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
        assert "needs 0 MB" in refused(files[:2])

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "could not be written (No space left on device); nothing was changed" in refused(files[:2])


def test_an_interruption_leaves_nothing_behind(files, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cofima.classifier.merge.tensors._merge", stop)
    before = set(files[0].parent.iterdir())
    with pytest.raises(KeyboardInterrupt):
        cofima.merge(files[:2], files[0].parent / "out.safetensors")
    assert set(files[0].parent.iterdir()) == before
