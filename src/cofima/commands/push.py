"""``cofima push``: a model goes to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from cofima.commands.console import interruptible, progress, say
from cofima.serve import hub


def push(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    repo: Annotated[str, typer.Argument(help="NAME or OWNER/NAME on the hub; made if it is not there.")],
    private: Annotated[
        bool, typer.Option("--private", help="Only you may see it, if it is made now.")
    ] = False,
    licence: Annotated[
        str | None, typer.Option("--license", help="The hub's name of a licence; the backbone's by default.")
    ] = None,
    with_images: Annotated[
        bool, typer.Option("--with-images", help="Upload images that the model holds, too.")
    ] = False,
) -> None:
    """Upload a model and its card to the Hugging Face hub, in one commit.

    Needs a token (hf auth login, or HF_TOKEN). The model can be loaded from a download of the repository.
    """
    with interruptible("the hub has all of it or nothing"), progress().stage(f"uploading to {repo}"):
        where = hub.push(model, repo, private=private, licence=licence, with_images=with_images)
    say(f"Model: {where}")
