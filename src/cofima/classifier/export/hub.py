"""Upload the current generation of a model, and its card, to the Hugging Face hub."""

import hashlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from cofima.classifier.export.card import model_card, without_paths
from cofima.core.errors import CofimaError
from cofima.store import model_folder
from cofima.store.generation import CURRENT, SHARED, Generation
from cofima.store.history import HistoryRow, dump_rows
from cofima.store.model import load_model
from cofima.store.record import CONFIG, FEATURES, HISTORY, Record

GENERATION = re.compile(r"\d{4}/")


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    license: str | None = None,
    with_images: bool = False,
    with_features: bool = False,
) -> str:
    """Upload the current generation with its card in one commit; return the URL.

    Args:
        folder: The model folder; earlier generations are not uploaded.
        repo: ``NAME`` or ``OWNER/NAME``; created if it does not exist.
        private: Create the repository as private.
        license: License identifier of the hub, for the card.
        with_images: Also upload the images stored in the model.
        with_features: Also upload the stored features of held-out images, on which forgetting is measured.
    """
    if constants.HF_HUB_OFFLINE:
        raise CofimaError(
            "HF_HUB_OFFLINE is set, so nothing is uploaded: unset it, and run the command again"
        )
    _refuse_name(repo)
    model = load_model(folder, where="cpu")
    held = 0 if model.images is None else len(model.images)
    if (held or model.method.keeps_images) and not with_images:
        which = held or f"those that {model.method.label} keeps"
        raise CofimaError(
            f"{folder} holds images ({which}), which others would see; give --with-images to upload them"
        )
    if get_token() is None:
        raise CofimaError("no token for the Hugging Face hub: run 'hf auth login', or set HF_TOKEN")
    generation = model_folder.read(folder)
    card = model_card(model, repo.rpartition("/")[2], license)
    private_files = set() if with_features else {FEATURES}
    told = without_places(generation, private_files)
    files = [
        generation.place(name) for name in (CONFIG, *generation.record.files) if name not in private_files
    ]
    additions = [
        CommitOperationAdd(file.relative_to(folder).as_posix(), told.get(file.name, file)) for file in files
    ]
    additions += [
        CommitOperationAdd(CURRENT, f"{generation.name}\n".encode()),
        CommitOperationAdd("README.md", card.encode()),
    ]
    return _send(repo, additions, private, f"{model.method.label}, {len(model.classes)} classes")


def without_places(generation: Generation, left_out: Collection[str] = ()) -> dict[str, bytes]:
    """Return config.json and history.jsonl with names in place of paths, which are private.

    Files that are ``left_out`` are not listed in config.json.
    """
    rows = [HistoryRow.model_validate(without_paths(row.model_dump())) for row in generation.history()]
    if rows and FEATURES in left_out:
        rows[-1].kept_features = 0
    history = dump_rows(rows).encode()
    record = Record.model_validate(without_paths(generation.record.model_dump()))
    files = {name: digest for name, digest in record.files.items() if name not in left_out}
    files[HISTORY] = hashlib.sha256(history).hexdigest()
    config = record.model_copy(update={"files": files}).text()
    return {HISTORY: history, CONFIG: config.encode()}


def _send(repo: str, additions: list[CommitOperationAdd], private: bool, message: str) -> str:
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        ours = {one.path_in_repo for one in additions}
        old = [
            CommitOperationDelete(path)
            for path in api.list_repo_files(made.repo_id)
            if (GENERATION.match(path) or SHARED.fullmatch(path)) and path not in ours
        ]
        api.create_commit(made.repo_id, [*additions, *old], commit_message=message)
    except HfHubHTTPError as error:
        raise CofimaError(f"the hub refused the upload to {repo}: {_first_line(error)}") from error
    except Exception as error:
        if not _is_network(error):
            raise
        raise CofimaError(
            f"the hub cannot be reached ({type(error).__name__}: {_first_line(error)}); nothing was uploaded"
        ) from error
    return str(made)


def _refuse_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CofimaError(f"'{repo}' is no name for the hub: {_first_line(error)}") from error


def _is_network(error: Exception) -> bool:
    """Return True if the connection failed, whichever HTTP library huggingface_hub uses."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError", "ConnectError", "TimeoutException", "OSError"})


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
