"""A model in use by several people at once: many predict, one at a time changes it."""

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
    """A model folder in use: many predict at once, one at a time changes it.

    Changes by other processes (``cofima extend``, ``cofima undo``) are seen at the next call.
    """

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder, self.limits = folder, limits or Limits()
        self._writing, self._loading, self._asking = (threading.Lock() for _ in range(3))
        self._loaded = load(folder)

    @property
    def classifier(self) -> Classifier:
        """Return the classifier of the current generation."""
        with self._loading:
            if model_folder.current(self.folder) != self._loaded.generation:
                self._loaded = load(self.folder)
            return self._loaded

    def ask(self, paths: Sequence[Path]) -> list[Prediction]:
        """Return a prediction for each image; one that cannot be read gets an error of its own."""
        self.limits.check_count(paths)
        faults = {path: self.limits.fault(path) for path in paths}
        good = [path for path, fault in faults.items() if not fault]
        with self._asking:  # a network must not be used by two threads at once
            answers = iter(self._answers(self.classifier, good))
            return [
                Prediction(str(path), error=fault) if fault else next(answers)
                for path, fault in faults.items()
            ]

    def knows(self, name: str) -> bool:
        """Return True if a class has this name already."""
        return normalize_name(name) in self.classifier.classes

    def add(
        self, name: str, paths: Sequence[Path], progress: Progress = SILENT, *, more: bool = False
    ) -> Extension:
        """Learn a new class from a few photographs; the generation before is kept for :meth:`undo`.

        A known class gets more photographs only with ``more``.
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
            learner = load(self.folder)  # a copy of its own: predictions use the old model until it is saved
            outcome = learner.extend(listing, only_new=not more, progress=progress)
            learner.save()
            return outcome

    def undo(self) -> str:
        """Go back to the generation before; return its name."""
        with self._alone():
            _, now = model_folder.undo(self.folder)
            return now.name

    def history(self) -> list[HistoryRow]:
        """Return the history of the model, oldest first."""
        return model_folder.read_history(self.folder)

    def _check_readable(self, paths: Sequence[Path], progress: Progress) -> None:
        """Raise with the name of each file that cannot be decoded: its header alone may be whole."""
        samples = [Sample(path.name, 0, path.read_bytes) for path in paths]
        found = loader.check(samples, progress, lambda at, image: None)
        wrong = [f"{one.name}: {fault}" for one, (_, fault) in zip(samples, found, strict=True) if fault]
        if wrong:
            raise first_problems("what was uploaded", wrong)

    def _answers(self, classifier: Classifier, paths: list[Path]) -> list[Prediction]:
        measured = sum(len(each) for each in classifier.model.serving.get("distances") or [])
        if measured < 1 / UNKNOWN_SHARE:  # too few for this quantile of their distances
            return classifier.predict(paths, top=NEAREST)
        try:
            return classifier.predict(paths, top=NEAREST, unknown=UNKNOWN_SHARE)
        except CofimaError:  # this method has no distances
            return classifier.predict(paths, top=NEAREST)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the right to change the model; raise at once if somebody else has it."""
        if not self._writing.acquire(blocking=False):
            raise CofimaError("somebody else is changing the model just now: try again when that is done")
        try:
            yield
        finally:
            self._writing.release()
