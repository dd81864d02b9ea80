"""Commands for weights: merge models, and measure Fisher information."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cofima.classifier.merge.request import MergeMethod
from cofima.cli.console import AnyModel, Command, Force, SkipUnreadable, out_option, progress, read_model, say
from cofima.core.wording import count, some

LISTS = ("--weights", "--fisher", "--skip", "--classes")


class ListOptions(Command):
    """Command whose list options take all words up to the next option: ``--weights 0.2 0.3 0.5``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat a list option before each of its words, as click expects."""
        return super().parse_args(ctx, spread(args))


def spread(args: list[str]) -> list[str]:
    """Return the words with each list option repeated before each of its values."""
    words: list[str] = []
    current = ""
    for word in args:
        if word.startswith("-") and not _is_number(word):
            current = word if word in LISTS else ""
            words += [] if current else [word]
        else:
            words += [current, word] if current else [word]
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Model folders, models on the hub (hf://...), or .safetensors and .pth files; the order "
            "matters.",
        ),
    ],
    output: Annotated[Path, out_option("The merged folder or file.")],
    method: Annotated[
        MergeMethod, typer.Option("--method", "-m", help="Merge method.")
    ] = MergeMethod.average,
    lam: Annotated[
        float | None,
        typer.Option(
            help="Share of the second of two models (0.5); scale of task vectors (0.4; ties 1, magmax 0.5, "
            "breadcrumbs 0.2)."
        ),
    ] = None,
    weights: Annotated[
        list[float] | None,
        typer.Option(metavar="W1 W2 ...", help="Weight of each model, instead of lam."),
    ] = None,
    fisher: Annotated[
        list[Path] | None, typer.Option(metavar="F1 F2 ...", help="Files of cofima fisher, one per model.")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="Weights that the models were fine-tuned from.")] = None,
    density: Annotated[
        float | None,
        typer.Option(help="Share of each task vector that is kept (ties 0.2, breadcrumbs 0.15, dare 0.1)."),
    ] = None,
    outliers: Annotated[
        float | None, typer.Option(help="Share of the largest changes that breadcrumbs drops (0.006).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of what dare drops (0).")] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN ...", help="Tensors of files to leave out: --skip 'fc.*'."),
    ] = None,
    classes: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="C1 C2 ...",
            help="Text files with one class per line, one per model: merge heads by class.",
        ),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="The classification layer, if --classes fits several layers.")
    ] = None,
    force: Force = False,
) -> None:
    """Merge models of one architecture; they may have different classes, which are matched by name."""
    from cofima.classifier.merge.merge import merge as merge_models

    done = merge_models(
        [read_model(each) for each in models],
        output,
        method.value,
        lam=lam,
        weights=weights,
        fisher=fisher,
        base=base,
        density=density,
        outliers=outliers,
        seed=seed,
        skip=skip or [],
        classes=classes,
        head=head,
        force=force,
        progress=progress(),
    )
    for note in done.notes:
        say(f"note: {note}")
    if done.label:
        say(f"{done.label}, {len(done.classes)} classes, {done.bytes / 1e6:,.1f} MB")
        say(f"Model: {done.path}")
    else:
        known = f", {len(done.classes)} classes: {some(done.classes)}" if done.classes else ""
        say(f"Wrote {done.path}: {done.bytes / 1e6:,.1f} MB{known}")


def fisher(
    model: AnyModel,
    images: Annotated[
        Path, typer.Argument(help="A folder with one subfolder per class of the model, or a CSV file.")
    ],
    output: Annotated[Path, out_option("The .safetensors file to write.")],
    labels: Annotated[
        Literal["data", "sampled", "exact"],
        typer.Option(help="True labels, labels sampled from the model, or the exact expectation."),
    ] = "data",
    logits: Annotated[
        Literal["seen", "local"],
        typer.Option(help="Softmax over all classes of the model, or over those of the images."),
    ] = "seen",
    max_per_class: Annotated[int | None, typer.Option(help="Maximum number of images per class.")] = None,
    skip_unreadable: SkipUnreadable = False,
    seed: Annotated[
        int, typer.Option(help="Random seed of sampled labels, and of the choice by --max-per-class.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda.")] = "auto",
    force: Force = False,
) -> None:
    """Measure the diagonal Fisher information of a model, for a Fisher-weighted merge."""
    from cofima.classifier.merge.fisher_file import fisher as measure

    done = measure(
        read_model(model),
        images,
        output,
        labels=labels,
        logits=logits,
        max_per_class=max_per_class,
        skip_unreadable=skip_unreadable,
        seed=seed,
        device=device,
        force=force,
        progress=progress(),
    )
    say(f"Wrote {done.path}: {done.images} images of {count(done.classes, 'class', 'es')}")
