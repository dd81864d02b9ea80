"""Features of a frozen backbone: computed once, bit-identical from the cache, never stale."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from cofima.core.atomic import cache_folder
from cofima.core.errors import CofimaError, CofimaWarning
from cofima.data.image_set import ImageSet
from cofima.data.loading.pixel_format import PixelFormat
from cofima.data.sources.in_memory import blobs
from cofima.data.stream import from_groups
from cofima.models.net import Net
from cofima.store import model_folder
from cofima.training import features as module
from cofima.training.evaluate import evaluate
from cofima.training.features import BATCH_SIZE, CachedFeatures

both = pytest.mark.parametrize("network", ["vit_test", "resnet_test"])
USERS = [
    ("prototype", {}),
    ("ranpac", {"petl": "none"}),
    ("ranpac", {"petl": "ssf", "adapt": {"epochs": 1}}),
    ("l2p", {}),
    ("dual_prompt", {}),
]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the batches that pass through a backbone, as they do."""
    sizes: list[int] = []
    whole = Net.features
    monkeypatch.setattr(Net, "features", lambda net, x: (sizes.append(len(x)), whole(net, x))[1])
    return sizes


def fixed(tiny, network: str = "vit_test", **context) -> CachedFeatures:
    return CachedFeatures(tiny.net(network), replace(tiny.context(), **context))


def some(count: int = 80) -> ImageSet:
    images = blobs(8, 10, 16).train
    assert len(images) == 80
    return images.select(torch.arange(count))


@both
def test_a_feature_depends_on_its_image_alone(network: str, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COFIMA_FEATURES", "off")
    images = some()
    whole = fixed(tiny, network)(images)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    assert torch.equal(fixed(tiny, network)(images.select(order)), whole[order])
    for place in (0, 17, 79):
        assert torch.equal(
            fixed(tiny, network)(images.select(torch.tensor([place]))), whole[place : place + 1]
        )
    plain = fixed(tiny, network)
    seen = plain.context.view.test(images.pixels[images.rows])
    with torch.no_grad():
        torch.testing.assert_close(whole, plain.net.eval().features(seen))


def kept(folder: Path) -> dict[str, Tensor]:
    generation = model_folder.read(folder)
    return generation.weights() | generation.state()


@pytest.mark.parametrize(("name", "options"), USERS, ids=str)
def test_a_warm_run_a_cold_one_and_one_without_are_the_same_bits(
    name: str, options: dict, tiny, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, same_bits
) -> None:
    config = tiny.config(name, options=options, train={"epochs": 1})
    stream = tiny.stream((2, 1, 2), per_class=6)
    tiny.run(tmp_path / "other", config, tiny.stream((3, 2), per_class=6))
    runs = [tiny.run(tmp_path / "mixed", config, stream)]  # some images known, in another order
    assert list(cache.rglob("*.safetensors"))
    runs.append(tiny.run(tmp_path / "warm", config, stream))
    monkeypatch.setenv("COFIMA_CACHE", str(tmp_path / "new"))
    runs.append(tiny.run(tmp_path / "cold", config, stream))
    monkeypatch.setenv("COFIMA_FEATURES", "off")
    runs.append(tiny.run(tmp_path / "without", config, stream))
    for name in ("mixed", "warm", "without"):
        same_bits(kept(tmp_path / name), kept(tmp_path / "cold"))
    scores = [[(row.accuracy, row.top5, row.task_aware) for row in run.history] for run in runs]
    assert scores[0] == scores[1] == scores[2] == scores[3]


@both
def test_other_methods_and_seeds_pass_no_image_again(
    network: str, tiny, tmp_path: Path, pretrained: Path, passed: list[int]
) -> None:
    published = (
        {"model": {"pretrained": False}}
        if network == "resnet_test"
        else {"model": {"checkpoint": pretrained}}
    )
    dataset = blobs(6, 12, 16)

    def learn(name: str, groups: list[list[int]], seed: int, **options: str) -> int:
        passed.clear()
        config = tiny.config(name, network, seed=seed, options=options, **published)
        tiny.run(tmp_path / f"{name}{seed} {groups[0]}", config, from_groups(dataset, groups))
        return sum(passed)

    other = 3 if network == "resnet_test" else 4  # untrained weights are the seed's
    batches = [BATCH_SIZE] * (3 + 3)  # three tasks of 24 images, and of 12 that are tested on
    assert learn("prototype", [[0, 1], [2, 3], [4, 5]], 3) == BATCH_SIZE + sum(batches)
    for task in (["ranpac", [[0, 1], [2, 3], [4, 5]], 3], ["ranpac", [[5, 0, 2], [3], [1, 4]], other]):
        assert learn(*task, petl="none") == BATCH_SIZE  # only the picture that all backbones are shown


@pytest.mark.parametrize("where", ["off", None])
def test_test_images_pass_once_a_run_not_once_a_task(
    where: str | None, tiny, tmp_path: Path, passed: list[int], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    if where:
        monkeypatch.setenv("COFIMA_FEATURES", where)
    tiny.run(tmp_path, tiny.config("prototype"), tiny.stream((2,) * 6))
    assert passed == [BATCH_SIZE] * (1 + 6 + 6)
    assert cache.exists() == (where is None)


@pytest.mark.parametrize("name", ["l2p", "dual_prompt"])
def test_queries_of_test_images_pass_once_a_run(name: str, tiny, passed: list[int]) -> None:
    stream = tiny.stream((2, 2, 2))
    model = tiny.model(tiny.config(name, train={"epochs": 1}), stream)
    counts = []
    for task in stream:
        model.method.learn(task)
        passed.clear()
        model.method.score(stream[: task.index + 1])
        counts.append(passed.count(BATCH_SIZE))
    assert counts == [2, 1, 1]  # the picture, and each task's 12 test images, filled up


@pytest.mark.parametrize(("name", "options"), USERS, ids=str)
def test_the_score_is_that_of_what_is_predicted(name: str, options: dict, tiny) -> None:
    stream = tiny.stream((2, 1, 2))
    method = tiny.model(tiny.config(name, options=options, train={"epochs": 1}), stream).method
    for task in stream:
        method.learn(task)
        seen = stream[: task.index + 1]
        assert method.score(seen) == evaluate(method.predict, seen, method.context)


def test_the_same_image_twice_is_computed_once(tiny, passed: list[int]) -> None:
    images = some(20)
    twice = images.select(torch.arange(20).repeat(5))
    features = fixed(tiny)(twice)
    assert passed == [BATCH_SIZE, BATCH_SIZE]
    assert torch.equal(features, features[:20].repeat(5, 1))
    assert len(features[:20].unique(dim=0)) == 20


def test_an_image_is_known_by_its_pixels_not_by_its_label_or_place(tiny, passed: list[int]) -> None:
    images = some(10)
    one = fixed(tiny)
    features = one(images)
    copy = ImageSet(images.pixels[images.rows].flip(0), torch.arange(10), images.labels + 3)
    passed.clear()
    assert torch.equal(one(copy), features.flip(0))
    assert not passed
    copy.pixels[4, 1, 7, 7] += 1
    changed = ImageSet(copy.pixels, copy.rows, copy.labels)
    assert [torch.equal(a, b) for a, b in zip(one(changed), features.flip(0), strict=True)].count(False) == 1
    assert passed == [BATCH_SIZE]


@pytest.mark.parametrize("kind", ["small", "rows", "rows that are only tested"])
def test_images_may_be_stored_in_any_form(kind: str, tiny, passed: list[int]) -> None:
    pictures = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in blobs(4, 10, 24).train.pixels[:40]]
    small, view = kind == "small", tiny.context().view
    view = replace(
        tiny.context().view, stored=18, whole=0 if small else 20, shape=(24, 24) if small else None
    )
    form = PixelFormat(18, 16, 20, only_tested=kind.endswith("tested"))
    stored = [torch.from_numpy(np.array(p)).permute(2, 0, 1) if small else form.encode(p) for p in pictures]
    images = ImageSet(torch.stack(stored), torch.arange(40), torch.zeros(40))
    one = fixed(tiny, view=view)
    features = one(images)
    with torch.no_grad():
        torch.testing.assert_close(features, one.net.backbone(view.test(images.pixels)))
    passed.clear()
    assert torch.equal(fixed(tiny, view=view)(images.select(torch.arange(39, -1, -1))), features.flip(0))
    assert passed == [BATCH_SIZE]


def test_the_same_bytes_in_another_shape_are_another_image() -> None:
    pixels = torch.arange(3 * 4 * 9, dtype=torch.uint8)
    assert len({module._key_of(pixels.view(3, *shape)) for shape in ((4, 9), (9, 4), (6, 6))}) == 3


def grow_weight(one: CachedFeatures) -> None:
    one.net.backbone.conv1.weight.data[:] *= 1.0001  # not even seen by torch's counters


def move_buffer(one: CachedFeatures) -> None:
    next(b for name, b in one.net.backbone.named_buffers() if "var" in name)[0] *= 1.5


def replace_activation(one: CachedFeatures) -> None:
    one.net.backbone.act1 = nn.SiLU()  # the same weights


def brighten(one: CachedFeatures) -> None:
    one.context = replace(one.context, view=replace(one.context.view, mean=(0.4, 0.5, 0.5)))


@pytest.mark.parametrize("change", [grow_weight, move_buffer, replace_activation, brighten])
def test_what_changes_features_finds_none_of_the_old_ones(
    change: Callable[[CachedFeatures], None], tiny, passed: list[int], cache: Path
) -> None:
    images = some(20)
    before = fixed(tiny, "resnet_test")(images)
    for _ in range(2):
        passed.clear()
        one = fixed(tiny, "resnet_test")
        change(one)
        after = one(images)
        assert not torch.equal(after, before)
        with torch.no_grad():
            seen = one.context.view.test(images.pixels[images.rows])
            torch.testing.assert_close(after, one.net.backbone(seen))
    assert passed == [BATCH_SIZE]  # the second time they are known
    assert len(list((cache / "features").iterdir())) == 2


def test_crops_and_flips_of_training_do_not_matter(tiny, passed: list[int]) -> None:
    images, one = some(20), fixed(tiny)
    features = one(images)
    varied = replace(one.context.view, flip=True, crop=0.5, interpolation="bilinear")
    passed.clear()
    assert torch.equal(fixed(tiny, view=varied)(images), features)
    assert passed == [BATCH_SIZE]


@pytest.mark.parametrize("which", ["torch.__version__", "torch.get_num_threads"])
def test_features_computed_otherwise_are_not_taken(
    which: str, tiny, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed(tiny)(some(20))
    monkeypatch.setattr(which, "0.0" if which.endswith("__") else lambda: 77)
    passed.clear()
    fixed(tiny)(some(20))
    assert passed == [BATCH_SIZE, BATCH_SIZE]


def test_weights_that_move_between_tasks_are_noticed(tiny) -> None:
    stream = tiny.stream((2, 2))
    method = tiny.model(tiny.config("prototype"), stream).method
    method.learn(stream[0])
    before = method.features(stream[1].train)
    with torch.no_grad():
        method.net.backbone.norm.weight[0] += 1
    method.learn(stream[1])
    after = method.features(stream[1].train)
    assert not torch.equal(after, before)
    assert torch.equal(after, CachedFeatures(method.net, method.context)(stream[1].train))


def test_adapted_features_are_those_of_the_adapted_backbone(tiny) -> None:
    stream = tiny.stream((2, 2))
    options = {"petl": "ssf", "adapt": {"epochs": 2, "batch_size": 8}}
    method = tiny.model(tiny.config("ranpac", options=options), stream).method
    before = method.features(stream[0].train)
    method.learn(stream[0])
    seen = method.context.view.test(stream[0].train.batch(torch.arange(24))[0])
    after = method.features(stream[0].train)
    assert not torch.allclose(after, before, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(after, method.net.features(seen))


class Placed(nn.Module):
    """A backbone whose answer depends on the place in the batch."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) + torch.arange(len(images))[:, None]


def test_features_that_depend_on_their_place_are_not_kept(tiny, cache: Path, passed: list[int]) -> None:
    one = fixed(tiny)
    one.net.backbone = Placed()
    images = some(40)
    first = one(images)
    with torch.no_grad():
        seen = one.context.view.test(images.pixels[images.rows])
    torch.testing.assert_close(first[:32], Placed()(seen[:32]))
    part = images.select(torch.arange(20, 40))
    alone = one(part)
    torch.testing.assert_close(alone, Placed()(seen[20:]))  # as if nothing else had been asked for
    assert torch.equal(one(images), first)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["seq_ft", "slca", "cofima", "joint"])
def test_methods_whose_backbone_moves_keep_no_features(name: str, tiny, tmp_path: Path, cache: Path) -> None:
    tiny.run(tmp_path, tiny.config(name, train={"epochs": 1}), tiny.stream((2, 2), per_class=6))
    assert not cache.exists()


def test_a_crash_costs_little(tiny, monkeypatch: pytest.MonkeyPatch, passed: list[int]) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY", BATCH_SIZE)
    one, images = fixed(tiny), some(80)
    whole, calls = one._compute, []

    def compute(some: dict[bytes, Tensor]) -> dict[bytes, Tensor]:
        calls.append(len(some))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(some)

    monkeypatch.setattr(one, "_compute", compute)
    with pytest.raises(KeyboardInterrupt):
        one(images)
    passed.clear()
    fixed(tiny)(images)
    assert passed == [BATCH_SIZE, BATCH_SIZE]  # the picture, and what is left: 16 images


def test_damage_between_runs_changes_nothing(tiny, cache: Path) -> None:
    images = some(40)
    before = fixed(tiny)(images)
    (file,) = cache.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(CofimaWarning, match="computed anew"):
        assert torch.equal(fixed(tiny)(images), before)
    assert torch.equal(fixed(tiny)(images), before)


def test_the_cache_is_where_the_user_says_or_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (("/some/where", Path("/some/where")), ("~/mine", tmp_path / "mine")):
        monkeypatch.setenv("COFIMA_CACHE", given)
        assert cache_folder() == expected
    monkeypatch.setenv("COFIMA_CACHE", "~nobody-of-this-name/mine")
    with pytest.raises(CofimaError, match="set COFIMA_CACHE"):
        cache_folder()
    monkeypatch.setenv("COFIMA_CACHE", "")
    assert cache_folder() == tmp_path / ".cache" / "cofima"
