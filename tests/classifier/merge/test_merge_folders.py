"""Merging of model folders: heads matched by class name, method states, and the resulting method."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import cofima
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import from_groups
from cofima.methods.components.gaussians import ClassGaussians
from cofima.report.history import history_table
from cofima.store import model_folder
from cofima.store.model import Model, load_model, save_model
from cofima.store.record import BACKBONE, CONFIG
from cofima.training.evaluate import evaluate
from cofima.weights import average, fisher_average

FIRST, SECOND = ((0, 1), (2, 3)), ((3, 2), (4, 5), (1,))  # share classes 1, 2 and 3, in another order

FIXED = {"shrinkage": 0.3}


def pixels(count: int = 5) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def head(model: Model) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return each class's row and bias of the head that predicts."""
    flat = model.method.head().flat()
    return {n: (w, b) for n, w, b in zip(model.classes, flat["weight"], flat["bias"], strict=True)}


def backbone(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.method.net.backbone.state_dict())


@pytest.fixture
def pair(learn) -> list[Path]:
    return [learn("coma", FIRST), learn("coma", SECOND)]


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_heads_are_merged_by_name_and_backbones_by_weight(
    lam: float, pair, tmp_path: Path, same_bits
) -> None:
    done = cofima.merge(pair, tmp_path / "out", lam=lam)
    a, b, found = load_model(pair[0]), load_model(pair[1]), load_model(tmp_path / "out")
    same_bits(backbone(found), average(backbone(a), backbone(b), lam))
    ours, rows, others = head(found), head(a), head(b)
    assert found.classes == done.classes == [*a.classes, *(c for c in b.classes if c not in rows)]
    (row,) = found.history
    assert (row.kind, row.task, row.classes) == ("merge", len(found.tasks), found.classes)
    first, second = (f"of {path.name}: CoMA, {n} classes" for path, n in zip(pair, (4, 5), strict=True))
    assert row.notes[0] == f"average, lam {lam:g}"
    assert row.command.endswith(f"-o MODEL --method average --lam {lam:g}")
    assert [note.partition(" (")[0] for note in row.notes[1:]] == [first, second]
    assert f"Merge 1: average, lam {lam:g}; {first} (" in history_table(found.history).note
    for name, (weight, bias) in ours.items():
        if name in rows and name in others:
            torch.testing.assert_close(weight, torch.lerp(rows[name][0], others[name][0], lam))
            torch.testing.assert_close(bias, torch.lerp(rows[name][1], others[name][1], lam))
        else:
            kept = rows.get(name) or others[name]
            assert torch.equal(weight, kept[0])
            assert torch.equal(bias, kept[1])


def test_the_merged_folder_predicts_as_manual_averaging_does(pair, tmp_path: Path) -> None:
    cofima.merge(pair, tmp_path / "out", lam=0.3)
    a, b, found = load_model(pair[0]), load_model(pair[1]), load_model(tmp_path / "out")
    manual = load_model(pair[0])
    manual.method.net.backbone.load_state_dict(average(backbone(a), backbone(b), 0.3))
    with torch.inference_mode():
        features = manual.method.net.features(manual.view.test(pixels()))
    rows, others, columns = head(a), head(b), []
    for name in found.classes:
        one, two = rows.get(name) or others[name], others.get(name) or rows[name]
        columns.append(features @ torch.lerp(one[0], two[0], 0.3) + torch.lerp(one[1], two[1], 0.3))
    torch.testing.assert_close(found.logits(pixels()), torch.stack(columns, 1), rtol=1e-4, atol=1e-5)


def test_tasks_are_those_of_the_first_then_what_is_new(pair, tmp_path: Path) -> None:
    cofima.merge(pair, tmp_path / "out")
    a, b, found = (load_model(path) for path in (*pair, tmp_path / "out"))
    assert found.tasks[:2] == a.tasks
    assert found.tasks[2:] == [b.tasks[1]]  # blob 2, 3 and 1 are known
    assert found.planned == 3
    assert (tmp_path / "out" / "CURRENT").read_text() == "0003\n"
    assert found.data["merged"]["by"] == "average, lam 0.5"
    assert [m["path"] for m in found.data["merged"]["models"]] == [str(path) for path in pair]


def test_raw_heads_and_gaussians_come_along(pair, tmp_path: Path) -> None:
    cofima.merge(pair, tmp_path / "out", lam=0.3)
    a, b, found = (load_model(path) for path in (*pair, tmp_path / "out"))
    flat = found.method.net.head.flat()["weight"]
    for row, name in enumerate(found.classes):
        mine = [
            m.method.net.head.flat()["weight"][m.classes.index(name)] for m in (a, b) if name in m.classes
        ]
        expected = mine[0] if len(mine) == 1 else torch.lerp(*mine, 0.3)
        torch.testing.assert_close(flat[row], expected)
        kept: ClassGaussians = found.method.gaussians  # type: ignore[attr-defined]
        known = [(m.method.gaussians, m.classes.index(name)) for m in (a, b) if name in m.classes]
        assert kept.counts[row] == sum(g.counts[at] for g, at in known)
        if len(known) == 1:
            gaussians, at = known[0]
            assert torch.equal(kept.means[row], gaussians.means[at])
            assert torch.equal(kept.covariance(row), gaussians.covariance(at))
    assert len(found.method.gaussians) == len(found.classes)  # type: ignore[attr-defined]


def test_same_methods_stay_and_the_result_learns_on(learn, tiny, tmp_path: Path) -> None:
    paths = [learn("cofima", FIRST), learn("cofima", SECOND)]
    done = cofima.merge(paths, tmp_path / "out")
    assert done.label == "CoFiMA"
    assert done.notes == []
    found = load_model(tmp_path / "out")
    order = [int("".join(filter(str.isdigit, name))) for name in found.classes]
    groups = [order[:2], order[2:4], order[4:], [6, 7]]
    stream = from_groups(blobs(8, per_class=4, side=16), groups)
    assert [n for t in stream[:3] for n in t.names] == found.classes
    found.method.learn(stream[3])
    score = evaluate(found.method.predict, stream, found.method.context)
    assert len(score.accuracy) == 4
    found.tasks.append(stream[3].names)
    save_model(found, tmp_path / "out")
    assert load_model(tmp_path / "out").classes[-2:] == list(stream[3].names)


def test_a_program_can_ask_the_result_and_extend_it(pair, tmp_path: Path) -> None:
    cofima.merge(pair, tmp_path / "out")
    classifier = cofima.load(tmp_path / "out")
    (answer,) = classifier.predict(np.zeros((20, 20, 3), np.uint8))
    assert answer.label in classifier.classes
    draw = np.random.default_rng(0)
    for number in range(6):
        (tmp_path / "photos" / "new").mkdir(parents=True, exist_ok=True)
        noise = draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "photos" / "new" / f"{number}.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CofimaWarning)
        classifier.extend(tmp_path / "photos", epochs=1)
    classifier.save()
    assert cofima.load(tmp_path / "out").classes == [*load_model(pair[0]).classes, *classifier.classes[4:]]
    assert classifier.classes[-1] == "new"


def test_fisher_in_the_state_is_summed_class_by_class(learn, tmp_path: Path) -> None:
    paths = [learn("cofima", FIRST), learn("cofima", SECOND)]
    cofima.merge(paths, tmp_path / "out")
    a, b, found = (load_model(path) for path in (*paths, tmp_path / "out"))
    sums = [m.method.old_fisher for m in (a, b, found)]  # type: ignore[attr-defined]
    assert sums[2].keys() == dict(found.method.net.named_parameters()).keys()
    for key, value in sums[2].items():
        if key.startswith("backbone."):
            torch.testing.assert_close(value, sums[0][key] + sums[1][key])

    def rows(fisher: dict[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
        flat = torch.cat([fisher[f"head.blocks.{k}.weight"] for k in range(len(model.tasks))])
        return dict(zip(model.classes, flat, strict=True))

    one, two, both = (rows(f, m) for f, m in zip(sums, (a, b, found), strict=True))
    for name, value in both.items():
        zero = torch.zeros_like(value)
        torch.testing.assert_close(value, one.get(name, zero) + two.get(name, zero))


@pytest.mark.parametrize(
    ("methods", "label", "left"),
    [
        (("coma", "slca"), "SLCA", ""),
        (("cofima", "coma"), "SLCA", "fisher"),
        (("coma", "seq_ft"), "Seq FT", "gaussians, raw_head"),
        (("seq_ft", "lwf"), "Seq FT", ""),
        (("wise_ft", "wise_ft"), "WiSE-FT", None),
        (("der_pp", "gdumb"), "Seq FT", "memory, start"),
        (("ewc", "ewc"), "EWC", None),
        (("magmax", "magmax"), "SLCA", "start, trained, vector"),
    ],
)
def test_what_a_mixture_becomes(methods, label: str, left: str | None, learn, tmp_path: Path) -> None:
    paths = [learn(methods[0], FIRST), learn(methods[1], SECOND)]
    done = cofima.merge(paths, tmp_path / "out")
    assert done.label == label
    assert load_model(tmp_path / "out").logits(pixels()).shape == (5, 6)
    if left is None:
        assert done.notes == []
    else:
        (note,) = done.notes
        assert f"it continues as {label}" in note
        assert note.endswith(f"leaves behind: {left}") if left else "leaves behind" not in note


def test_ewc_with_centers_continues_as_fine_tuning(learn, tmp_path: Path) -> None:
    paths = [learn("ewc", FIRST, form="separate"), learn("ewc", SECOND, form="separate")]
    assert "leaves behind: center, fisher" in cofima.merge(paths, tmp_path / "out").notes[0]
    load_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("l2p", "prompts"),
        ("dual_prompt", "prompts"),
        ("ranpac", "projection"),
        ("fecam", "correlation"),
    ],
)
def test_methods_with_other_parts_are_refused(method: str, reason: str, learn, tmp_path: Path) -> None:
    paths = [learn(method, FIRST), learn("seq_ft", SECOND)]
    with pytest.raises(CofimaError, match=f"predicts with .*{reason}"):
        cofima.merge(paths, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_prototypes_are_joined_but_not_averaged(learn, tmp_path: Path, same_bits) -> None:
    apart = [learn("prototype", ((0, 1),)), learn("prototype", ((2, 3),))]
    cofima.merge(apart, tmp_path / "out")
    a, b, found = (load_model(path) for path in (*apart, tmp_path / "out"))
    rows = torch.cat([m.method.head().flat()["weight"] for m in (a, b)])
    assert torch.equal(found.method.head().flat()["weight"], rows)
    same_bits(backbone(found), backbone(a))  # frozen: an average of equals
    with pytest.raises(CofimaError, match="average of two prototypes"):
        cofima.merge([apart[0], learn("prototype", ((1, 2),))], tmp_path / "no")


def test_batch_norm_nets_are_merged_with_a_note(learn, tmp_path: Path, same_bits) -> None:
    paths = [learn("seq_ft", FIRST, "resnet_test"), learn("seq_ft", SECOND, "resnet_test")]
    done = cofima.merge(paths, tmp_path / "out", lam=0.3)
    assert "batch normalization" in done.notes[0]
    a, b, found = (load_model(path) for path in (*paths, tmp_path / "out"))
    same_bits(backbone(found), average(backbone(a), backbone(b), 0.3))
    assert cofima.merge(paths, tmp_path / "end", lam=1).notes == []


def test_another_backbone_or_view_is_refused_with_every_difference(learn, tmp_path: Path) -> None:
    with pytest.raises(CofimaError, match=r"backbone: vit_test in .*, resnet_test in"):
        cofima.merge([learn("seq_ft", FIRST), learn("seq_ft", SECOND, "resnet_test")], tmp_path / "out")


def test_three_folders_with_weights(learn, tmp_path: Path, same_bits) -> None:
    paths = [learn("seq_ft", FIRST), learn("seq_ft", SECOND), learn("seq_ft", ((5, 1), (6, 7)))]
    cofima.merge(paths, tmp_path / "out", weights=[1, 2, 5])
    models, found = [load_model(path) for path in paths], load_model(tmp_path / "out")
    same_bits(backbone(found), cofima.average_all([backbone(m) for m in models], [1, 2, 5]))
    heads = [head(m) for m in models]
    for name, (weight, _) in head(found).items():
        mine = [(w, h[name][0]) for w, h in zip((1, 2, 5), heads, strict=True) if name in h]
        torch.testing.assert_close(weight, sum(w * row for w, row in mine) / sum(w for w, _ in mine))


# --- with a base -----------------------------------------------------------------------------------


def test_a_file_as_base_moves_the_backbone_alone(learn, start: Path, tmp_path: Path, same_bits) -> None:
    path, zero = learn("slca", FIRST), load_file(start)
    cofima.merge([path], tmp_path / "out", "wise_ft", base=start, lam=0.25)
    model, found = load_model(path), load_model(tmp_path / "out")
    same_bits(backbone(found), average(zero, backbone(model), 0.25))
    same_bits(found.method.head().flat(), model.method.head().flat())
    same_bits(found.method.state(), model.method.state())
    with_head = zero | {"head.weight": torch.zeros(10, 16), "head.bias": torch.zeros(10)}
    save_file(with_head, tmp_path / "full.safetensors")  # a head without names says nothing
    cofima.merge([path], tmp_path / "again", "wise_ft", base=tmp_path / "full.safetensors", lam=0.25)
    same_bits(backbone(load_model(tmp_path / "again")), backbone(found))


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_one_model_at_scale_one_is_the_model(
    method: str, learn, start: Path, tmp_path: Path, same_bits
) -> None:
    path = learn("coma", FIRST)
    how = {"density": 1.0} if method == "ties" else {}
    cofima.merge([path], tmp_path / "out", method, base=start, lam=1, **how)
    same_bits(load_model(tmp_path / "out").weights(), load_model(path).weights())


def test_task_vectors_of_folders_with_a_folder_as_base(learn, tmp_path: Path) -> None:
    base, paths = learn("seq_ft", ((0, 7),)), [learn("seq_ft", FIRST), learn("seq_ft", SECOND)]
    cofima.merge(paths, tmp_path / "out", "task_arithmetic", base=base, lam=0.3)
    start, a, b, found = (load_model(path) for path in (base, *paths, tmp_path / "out"))
    theta, one, two = (backbone(m) for m in (start, a, b))
    for key, value in backbone(found).items():
        torch.testing.assert_close(
            value, theta[key] + 0.3 * (one[key] - theta[key]) + 0.3 * (two[key] - theta[key])
        )
    assert found.classes[:2] == start.classes  # the base comes first
    heads, ours = [head(m) for m in (start, a, b)], head(found)
    zero, seven = start.classes
    torch.testing.assert_close(ours[seven][0], heads[0][seven][0])  # only the base knows it
    torch.testing.assert_close(
        ours[zero][0], heads[0][zero][0] + 0.3 * (heads[1][zero][0] - heads[0][zero][0])
    )
    shared = next(c for c in a.classes if c in b.classes and c != zero)
    torch.testing.assert_close(ours[shared][0], (heads[1][shared][0] + heads[2][shared][0]) / 2)


# --- places and damage -----------------------------------------------------------------------------


def test_out_is_replaced_only_if_told_and_only_if_it_is_a_model(pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cofima.merge(pair, out, lam=0)
    with pytest.raises(CofimaError, match="exists; give another place, or --force"):
        cofima.merge(pair, out)
    cofima.merge(pair, out, lam=1, force=True)
    assert load_model(out).data["merged"]["by"] == "average, lam 1"
    assert list(tmp_path.iterdir()) == [out]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("mine")
    with pytest.raises(CofimaError, match="is not a model folder; it is left alone"):
        cofima.merge(pair, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "note.txt").read_text() == "mine"
    for place in (pair[0], pair[0] / "inside", pair[0].parent):
        with pytest.raises(CofimaError, match="would overwrite"):
            cofima.merge(pair, place, force=True)


def test_a_damaged_folder_and_a_mixture_of_kinds_are_refused(pair, tmp_path: Path) -> None:
    hurt = tmp_path / "hurt"
    shutil.copytree(pair[0], hurt)
    weights = model_folder.read(hurt).place(BACKBONE)
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CofimaError, match="sha256 differs"):
        cofima.merge([hurt, pair[1]], tmp_path / "out")
    with pytest.raises(CofimaError, match="merge folders, or files"):
        cofima.merge([pair[0], weights], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CofimaError, match="is not a model folder"):
        cofima.merge([pair[0], tmp_path / "empty"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_different_starts_are_noted(learn, tiny, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = tiny.config("seq_ft", train={"epochs": 1}, seed=4)  # from other random weights
    tiny.run(other, config, from_groups(blobs(8, per_class=4, side=16), [[0, 1]]))
    done = cofima.merge([learn("seq_ft", FIRST), other], tmp_path / "out")
    assert "different pre-trained weights" in done.notes[-1]


def test_the_files_are_as_a_run_writes_them(pair, tmp_path: Path) -> None:
    cofima.merge(pair, tmp_path / "out")
    ours, theirs = (
        json.loads((model_folder.current(p) / CONFIG).read_text()) for p in (tmp_path / "out", pair[0])
    )
    assert ours.keys() == theirs.keys()
    names = {p.name.partition("-")[0] for p in (tmp_path / "out").iterdir()}
    assert names == {".lock", "CURRENT", "0003", "backbone"}


def test_fisher_weighted_folders(learn, tmp_path: Path) -> None:
    paths, known = [learn("slca", FIRST), learn("slca", SECOND)], []
    for path in paths:
        model = load_model(path)
        weights = model.weights()
        fisher = {
            k: torch.rand(v.shape, generator=torch.Generator().manual_seed(len(k)))
            for k, v in weights.items()
        }
        known.append(fisher)
        save_file(fisher, tmp_path / f"{len(known)}.safetensors")
    given = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    cofima.merge(paths, tmp_path / "out", "fisher", fisher=given, lam=0.3)
    a, b, found = (load_model(path) for path in (*paths, tmp_path / "out"))
    expected = fisher_average(backbone(a), backbone(b), *known, 0.3)
    torch.testing.assert_close(backbone(found), {k: expected[k] for k in backbone(a)})
    for name, (weight, _) in head(found).items():
        if name in a.classes and name in b.classes:
            f, g = (k["head.weight"][m.classes.index(name)] for k, m in zip(known, (a, b), strict=True))
            share = 0.3 * g / (0.3 * g + 0.7 * f)
            torch.testing.assert_close(weight, torch.lerp(head(a)[name][0], head(b)[name][0], share))


def test_scatters_add_up_and_a_discriminant_stays_one(learn, tmp_path: Path) -> None:
    lda = {"classifier": "lda"}
    paths = [learn("coma", FIRST, **lda), learn("coma", SECOND, **lda)]
    assert cofima.merge(paths, tmp_path / "out").notes == []
    a, b, found = (load_model(path).method.gaussians for path in (*paths, tmp_path / "out"))
    torch.testing.assert_close(found.scatter.tril(), (a.scatter + b.scatter).tril())
    assert found.degrees == a.degrees + b.degrees
    assert sum(found.counts) == sum(a.counts) + sum(b.counts)
    done = cofima.merge([paths[0], learn("slca", SECOND, **lda)], tmp_path / "other")
    assert done.label == "SLCA"
    assert load_model(tmp_path / "other").config.options["classifier"] == "lda"


def test_a_head_behind_a_projection_is_refused(learn, tmp_path: Path) -> None:
    ridge = {"classifier": "ridge", "closed_form": {"projection": 16}}
    with pytest.raises(CofimaError, match="predicts with a random projection"):
        cofima.merge([learn("coma", FIRST, **ridge), learn("coma", SECOND)], tmp_path / "out")


def test_heads_of_folders_need_no_help(pair, tmp_path: Path) -> None:
    with pytest.raises(
        CofimaError, match=r"skip: for files only; .* is a model folder, which names its classes"
    ):
        cofima.merge(pair, tmp_path / "out", skip=["head.*"])


def test_nan_in_a_head_is_named(pair, tmp_path: Path) -> None:
    broken = load_model(shutil.copytree(pair[0], tmp_path / "broken"))
    with torch.no_grad():
        next(broken.method.net.backbone.parameters()).view(-1)[0] = torch.nan
    save_model(broken, tmp_path / "broken")
    with pytest.raises(CofimaError, match=r"broken: \S+ holds NaN or Inf"):
        cofima.merge([pair[1], tmp_path / "broken"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_heads_on_one_backbone_are_solved_anew_for_all_classes(tiny, tmp_path: Path) -> None:
    """As if one model had learned all classes; averaged rows of two discriminants do not compare."""
    images = blobs(4, per_class=12, side=16)

    def learned(name: str, groups: list[tuple[int, ...]]) -> Model:
        config = tiny.config(
            "cofima", train={"epochs": 0}, options={"classifier": "lda", "closed_form": FIXED}
        )
        tiny.run(tmp_path / name, config, from_groups(images, groups))
        return load_model(tmp_path / name)

    whole = head(learned("whole", [(0, 1), (2, 3)]))
    for name, groups in (("a", [(0, 1)]), ("b", [(2, 3)])):
        learned(name, groups)
    done = cofima.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    found = head(load_model(tmp_path / "out"))
    assert done.classes == list(found)
    for name, (row, bias) in whole.items():
        torch.testing.assert_close(found[name][0], row)
        torch.testing.assert_close(found[name][1], bias)
