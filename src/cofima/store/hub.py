"""Model folders on the Hugging Face hub, as ``cofima push`` writes them: ``hf://OWNER/NAME@REVISION``.

Repositories are untrusted: only JSON and safetensors are downloaded, and the reader of model folders
validates everything that it uses.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cofima.core.errors import CofimaError
from cofima.core.hub import quick_hub
from cofima.core.names import shortened
from cofima.store.generation import CURRENT

PREFIX = "hf://"
FILES = (CURRENT, "*.safetensors", "*/config.json", "*/history.jsonl")


@dataclass(frozen=True)
class HubModel:
    """A downloaded model of the hub.

    Attributes:
        repo: Name of the repository, ``OWNER/NAME``.
        commit: The downloaded commit.
        folder: A model folder in the hub client's cache; read-only, as other programs share it.
    """

    repo: str
    commit: str
    folder: Path

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}@{self.commit}"


def is_address(model: object) -> bool:
    """Return True for a string that is the address of a hub model."""
    return isinstance(model, str) and model.startswith(PREFIX)


def is_snapshot(folder: Path) -> bool:
    """Return True for a snapshot folder in the hub client's cache."""
    above = folder.absolute().parent
    return above.name == "snapshots" and above.parent.name.startswith("models--")


def fetch(address: str) -> HubModel:
    """Download a model from the hub; cached files are not downloaded again.

    Without a revision, the newest commit is used. If the hub cannot be reached, the cached model is used; if
    there is none, an error is raised within seconds.
    """
    from huggingface_hub import snapshot_download

    repo, at, revision = address.removeprefix(PREFIX).partition("@")
    if bool(at) != bool(re.fullmatch(r"(?!.*\.\.)[\w][\w./-]*", revision)):
        raise _no_address(address)
    with _explained(address), quick_hub(), _no_bars():
        folder = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=list(FILES),
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    found = HubModel(repo, Path(folder).name, Path(folder))
    if not (found.folder / CURRENT).is_file():
        raise CofimaError(f"{found} is no model of cofima: it has no file {CURRENT}")
    return found


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Turn errors of the hub client into one-sentence messages."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = shortened(address)
    try:
        yield
    except HFValidationError as error:
        raise _no_address(address) from error
    except RevisionNotFoundError as error:
        raise CofimaError(f"{name}: the repository has no such branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise CofimaError(
            f"{name}: the hub has no such repository, or it is private and needs a token (hf auth login)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CofimaError(
            f"{name}: the hub cannot be reached, and the model is not on this machine"
        ) from error
    except HfHubHTTPError as error:
        raise CofimaError(f"{name}: the hub refused it ({_first_line(error)})") from error
    except OSError as error:
        raise CofimaError(f"{name} could not be fetched ({_first_line(error)})") from error


def _no_address(address: str) -> CofimaError:
    return CofimaError(f"'{shortened(address)}' is no address: it is {PREFIX}OWNER/NAME, or with @REVISION")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Disable the hub client's progress bars, and restore the setting afterwards."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
