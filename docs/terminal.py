"""Record real commands in a terminal as an animated picture: ``python docs/terminal.py PHOTOS NEW PHOTO``.

PHOTOS and NEW have one folder per class, and PHOTO is one of their images. The commands run here, in a folder
that is deleted afterwards; what they print becomes an SVG file that needs no script and no player.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

COLUMNS, LINE, CHARACTER, MARGIN = 80, 18, 8.4, 16
TYPING, READING, REST = 0.04, 0.35, 4.0  # seconds: a character typed, a line printed, before it starts again
OUT = Path(__file__).parent / "figures" / "terminal.svg"


def record(photos: Path, new: Path, photo: Path) -> list[tuple[str, list[str]]]:
    """Run the commands; return each as it is typed, with the lines that it printed."""
    places = {"photos": photos.resolve(), "new_photos": new.resolve(), "photo.jpg": photo.resolve()}
    commands = [
        "cofima learn photos -o model",
        "cofima extend model new_photos",
        "cofima predict model photo.jpg --top 2",
        "cofima history model",
        "cofima undo model",
    ]
    with TemporaryDirectory() as folder:
        for name, place in places.items():
            (Path(folder) / name).symlink_to(place)
        return [(f"$ {line}", run(line, Path(folder))) for line in commands]


def run(line: str, folder: Path) -> list[str]:
    """Run a command quietly in a folder; return the lines that it printed."""
    program, *words = shlex.split(line)
    done = subprocess.run(
        [sys.executable, "-m", program, "-q", *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": str(COLUMNS)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        line[i : i + COLUMNS]
        for line in done.stdout.splitlines()
        for i in range(0, max(len(line), 1), COLUMNS)
    ]


def draw(recorded: Sequence[tuple[str, list[str]]]) -> str:
    """Return the picture: every line appears at its time, and all of it starts again at the end."""
    lines: list[tuple[float, str, str]] = []
    now = 0.5
    for command, printed in recorded:
        now += TYPING * len(command)
        lines.append((now, command, "typed"))
        for text in printed:
            now += READING
            lines.append((now, text, "printed"))
        lines.append((now, "", "printed"))
    total = now + REST
    width, height = 2 * MARGIN + COLUMNS * CHARACTER, 2 * MARGIN + LINE * len(lines)
    frames = "".join(
        f"@keyframes l{number} {{ 0%, {at:.2f}% {{ opacity: 0 }} {at + 0.01:.2f}%, 100% {{ opacity: 1 }} }}\n"
        for number, at in enumerate(100 * at / total for at, _, _ in lines)
    )
    texts = "".join(
        f'<text class="{kind}" x="{MARGIN}" y="{MARGIN + LINE * (number + 0.75):g}" '
        f'style="animation: l{number} {total:.1f}s infinite">{escape(text)}</text>\n'
        for number, (_, text, kind) in enumerate(lines)
        if text
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        'aria-label="cofima learns photographs, is extended, predicts, shows its history, and is undone">\n'
        "<style>text { font: 14px ui-monospace, Menlo, Consolas, monospace; white-space: pre }\n"
        ".printed { fill: #e6edf3 }\n"
        ".typed { fill: #7ee787; font-weight: bold }\n"
        "@media (prefers-reduced-motion: reduce) { text { animation: none !important } }\n"
        f"{frames}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>\n{texts}</svg>\n'
    )


def main() -> None:
    """Record and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("photos", "new", "photo"):
        parser.add_argument(name, type=Path)
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    given = parser.parse_args()
    given.out.write_text(draw(record(given.photos, given.new, given.photo)), "utf-8")
    print(f"Wrote {given.out}")


if __name__ == "__main__":
    main()
