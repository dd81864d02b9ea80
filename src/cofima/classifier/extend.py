"""A model learns more, without the old images; the old model stays as it is until the new one is proven."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cofima.classifier.forgetting_check import Comparison, ForgettingCheck, ForgettingError, old_class_images
from cofima.classifier.learn import finish, learn_held_out, more_images, new_classes
from cofima.classifier.scoring import Accuracy
from cofima.core.errors import CofimaError, problems
from cofima.core.progress import SILENT, Progress
from cofima.data.image_set import concatenate
from cofima.data.sources.listing import Listing, find_images
from cofima.experiment import config as configs
from cofima.experiment.recipes.layers import override
from cofima.store.history import HistoryRow
from cofima.store.model import Model, copy_model
from cofima.training.options import TrainOptions

HELD_OUT = 0.15  # share of each class, where the model's configuration holds nothing out


@dataclass(frozen=True)
class Extension:
    """The outcome of an extension.

    Attributes:
        new: Classes that are new.
        more: Known classes that got more images.
        accuracy: On held-out images of all these, among all classes; empty where none were held out.
        old: What old classes lost, measured or estimated, or None where neither is possible.
        rows: Its rows of the history.
    """

    new: list[str]
    more: list[str]
    train_images: int
    accuracy: Accuracy
    old: Comparison | None
    rows: list[HistoryRow] = field(default_factory=list)


@dataclass(frozen=True)
class ExtendRequest:
    """What to learn, and under which conditions; None means not given.

    Attributes:
        check: Images of old classes on which to measure what they lose.
        max_drop: Points that old classes may lose on average.
        keep_images: Held-out images of each class to keep in the model.
        only_new: Refuse classes that are known already.
        skip_unreadable: Leave unreadable images out.
    """

    photos: Path
    check: Path | None = None
    max_drop: float | None = None
    keep_images: int | None = None
    only_new: bool = False
    skip_unreadable: bool = False


def extend(
    model: Model, request: ExtendRequest, how: TrainOptions, progress: Progress = SILENT
) -> tuple[Model, Extension]:
    """Return another model that has learned the photographs too; this one stays as it is."""
    found = find_images(request.photos)
    new, more = plan(model, request, found)
    old_images, source = old_class_images(model, request.check, request.skip_unreadable, progress)
    photos = found.read(model.view.pixel_format, skip_unreadable=request.skip_unreadable, progress=progress)
    check = ForgettingCheck(model, old_images, source)
    share = model.config.val_fraction or HELD_OUT
    learned = copy_model(model, progress)
    rows, held = [], []
    for names, make in ((more, more_images), (new, new_classes)):
        if not names:
            continue
        classes = [*learned.classes, *(new if make is new_classes else [])]
        train, held_out = photos.split(names, classes, share, model.config.data.split_seed)
        rows.append(learn_held_out(learned, make(learned, names, train, held_out), how, progress))
        held.append(held_out)
        check.learned.append(train)
    old = check.compare(learned)
    if request.max_drop is not None and old is not None and old.measured and old.drop > request.max_drop:
        raise ForgettingError(old, request.max_drop)
    accuracy = finish(learned, concatenate(*held), request.keep_images, rows)
    for row in rows:
        row.old = None if old is None else old.recorded()
    learned.history += rows
    return learned, Extension(new, more, sum(map(len, check.learned)), accuracy, old, rows)


def plan(model: Model, request: ExtendRequest, found: Listing) -> tuple[list[str], list[str]]:
    """Return the new and the known classes among the photographs, or say all that is wrong at once."""
    method, known = model.method, set(model.classes)
    new = [name for name in found.classes if name not in known]
    more = [name for name in found.classes if name in known]
    wrong = []
    if not method.can_extend:
        wrong.append(f"{method.label} learns all classes at once and cannot be extended; use cofima")
    if more and request.only_new:
        wrong.append(f"already known, where only new classes are asked for: {', '.join(more)}")
    elif more and method.can_extend and not method.can_refine:
        wrong.append(f"{method.label} cannot learn more images of known classes: {', '.join(more)}")
    elif len(more) == 1 and method.can_extend and not method.can_refine_one_class:
        wrong.append(f"{method.label} learns nothing from more images of one known class alone: {more[0]}")
    folded = {name.casefold(): name for name in known}
    wrong += [
        f"class '{name}' differs from the known class '{folded[name.casefold()]}' by case only"
        for name in new
        if name.casefold() in folded
    ]
    if request.max_drop is not None and request.max_drop < 0:
        wrong.append(f"max_drop = {request.max_drop:g}: points that may be lost, at least 0")
    if request.keep_images is not None and request.keep_images < 0:
        wrong.append(f"keep_images = {request.keep_images}: must be at least 0")
    if wrong:
        raise problems(f"extending by {request.photos}", wrong)
    return new, more


def train_options(before: TrainOptions, epochs: int | None, given: Sequence[str]) -> TrainOptions:
    """Return the training options of before, with what is given this time."""
    wrong = [item for item in given if not item.startswith("train.")]
    if wrong:
        raise CofimaError(f"an extension takes train.key=value items only, not {', '.join(wrong)}")
    values = override({"train": before.model_dump()}, given)["train"]
    if epochs is not None:
        values |= {"epochs": epochs, "milestones": None}
    return configs.check({"train": values}, "the settings of this extension").train
