"""A model shared by several users: concurrent predictions, one change at a time."""

import csv
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cofima.classifier.classifier import Classifier, load
from cofima.classifier.learn import Extension
from cofima.classifier.predict import Prediction
from cofima.classifier.web.limits import Limits
from cofima.core.errors import CofimaError, first_problems
from cofima.core.lock import folder_lock
from cofima.core.names import name_fault, shortened
from cofima.core.progress import SILENT, Progress
from cofima.data.loading import loader
from cofima.data.loading.loader import Sample
from cofima.data.sources.listing import normalize_name
from cofima.store import model_folder
from cofima.store.history import HistoryRow

NEAREST = 5
UNKNOWN_SHARE = 0.05


class Session:
    """A model folder shared by several users: concurrent predictions, one change at a time.

    Changes by other processes (``cofima extend``, ``cofima undo``) take effect at the next call.
    """

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder, self.limits = folder, limits or Limits()
        self._writing, self._loading, self._asking = (threading.Lock() for _ in range(3))
        self._loaded = load(folder)

    @property
    def classifier(self) -> Classifier:
        """Classifier of the current generation."""
        with self._loading:
            if model_folder.current(self.folder) != self._loaded.generation:
                self._loaded = load(self.folder)
            return self._loaded

    def ask(self, paths: Sequence[Path]) -> list[Prediction]:
        """Return a prediction for each image; an unreadable one gets a prediction with an ``error``."""
        self.limits.check_count(paths)
        faults = {path: self.limits.fault(path) for path in paths}
        good = [path for path, fault in faults.items() if not fault]
        with self._asking:  # a network must not be used by two threads at the same time
            answers = iter(self._answers(self.classifier, good))
            return [
                Prediction(str(path), error=fault) if fault else next(answers)
                for path, fault in faults.items()
            ]

    def knows(self, name: str) -> bool:
        """Return True if there is a class of this name."""
        return normalize_name(name) in self.classifier.classes

    def add(
        self, name: str, paths: Sequence[Path], progress: Progress = SILENT, *, more: bool = False
    ) -> Extension:
        """Learn a new class from a few photographs; the previous generation is kept for :meth:`undo`.

        A known class is an error unless ``more`` is given.
        """
        name = normalize_name(name)
        if not name:
            raise CofimaError("give the new class a name")
        if fault := name_fault(name):
            raise CofimaError(f"'{shortened(name)}' cannot be the name of a class: {fault}")
        self.limits.check(paths)
        with self._alone(), folder_lock(self.folder), TemporaryDirectory() as folder:
            self._check_readable(paths, progress)
            listing = Path(folder) / "photos.csv"
            with listing.open("w", newline="", encoding="utf-8") as file:
                table = csv.writer(file)
                table.writerow(["path", "label"])
                table.writerows([str(path.resolve()), name] for path in paths)
            learner = load(self.folder)  # a separate copy: predictions use the old model until it is saved
            outcome = learner.extend(listing, only_new=not more, progress=progress)
            learner.save()
            return outcome

    def undo(self) -> str:
        """Revert to the previous generation; return its name."""
        with self._alone():
            _, now = model_folder.undo(self.folder)
            return now.name

    def history(self) -> list[HistoryRow]:
        """Return the history of the model, oldest first."""
        return model_folder.read_history(self.folder)

    def _check_readable(self, paths: Sequence[Path], progress: Progress) -> None:
        """Raise with the names of all files that cannot be decoded: an intact header is not enough."""
        samples = [Sample(path.name, 0, path.read_bytes) for path in paths]
        found = loader.check(samples, progress, lambda at, image: None)
        wrong = [f"{one.name}: {fault}" for one, (_, fault) in zip(samples, found, strict=True) if fault]
        if wrong:
            raise first_problems("what was uploaded", wrong)

    def _answers(self, classifier: Classifier, paths: list[Path]) -> list[Prediction]:
        measured = sum(len(each) for each in classifier.model.serving.get("distances") or [])
        if measured < 1 / UNKNOWN_SHARE:  # too few distances for this quantile
            return classifier.predict(paths, top=NEAREST)
        try:
            return classifier.predict(paths, top=NEAREST, unknown=UNKNOWN_SHARE)
        except CofimaError:  # the method has no class Gaussians to measure distances from
            return classifier.predict(paths, top=NEAREST)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the write lock of the session; raise at once if another user has it."""
        if not self._writing.acquire(blocking=False):
            raise CofimaError("somebody else is changing the model just now: try again when that is done")
        try:
            yield
        finally:
            self._writing.release()
