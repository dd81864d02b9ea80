"""Upload limits of the web page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cofima.core.errors import CofimaError, problems


@dataclass(frozen=True)
class Limits:
    """Upload limits.

    Attributes:
        files: Maximum number of files per upload.
        megabytes: Maximum size of a file.
        megapixels: Maximum size of an image.
        total_megabytes: Maximum size of all uploads together.
    """

    files: int = 200
    megabytes: int = 20
    megapixels: int = 50
    total_megabytes: int = 2000

    def check(self, paths: Sequence[Path]) -> None:
        """Raise for too many files, or with a list of all invalid ones."""
        self.check_count(paths)
        wrong = [f"{path.name}: {fault}" for path in paths if (fault := self.fault(path))]
        if wrong:
            raise problems("what was uploaded", wrong[:20])

    def check_count(self, paths: Sequence[Path]) -> None:
        """Raise if there are no files, or too many."""
        if not paths:
            raise CofimaError("no images were given")
        if len(paths) > self.files:
            raise CofimaError(f"{len(paths)} files at once: at most {self.files} are taken")

    def fault(self, path: Path) -> str:
        """Return the problem of a file, or an empty string; only its header is read."""
        from PIL import Image

        from cofima.data.loading.decoder import open_image

        try:
            if path.stat().st_size > self.megabytes * 1_000_000:
                return f"larger than {self.megabytes} MB"
        except OSError:
            return "no longer kept: upload it again"
        try:
            with open_image(path) as image:
                if image.width * image.height > self.megapixels * 1_000_000:
                    return f"{image.width} x {image.height} is more than {self.megapixels} million pixels"
        except Image.DecompressionBombError:
            return f"more than {self.megapixels} million pixels"
        except Exception:  # decoders raise all kinds of errors for damaged files
            return "not an image, or damaged"
        return ""
