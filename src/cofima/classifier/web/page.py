"""Output files of an evaluation: a self-contained HTML page, a figure, and CSV tables."""

import base64
import io
from pathlib import Path

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image

from cofima.classifier.evaluate import Evaluation
from cofima.core.atomic import write_texts
from cofima.core.names import printable
from cofima.data.loading.decoder import decode_file
from cofima.report import render
from cofima.report.drawing import STYLE
from cofima.report.table import Cell, Column, Row, Table

PAIRS, EXAMPLES, SIDE = 12, 5, 112
NAMED = 40  # maximum number of classes for names and counts in the matrix
DARK = 0.5  # share of a class above which its cell is dark enough for white text


def write(found: Evaluation, folder: Path) -> list[Path]:
    """Write evaluation.html, confusion.svg, confusion.csv and classes.csv."""
    texts = {
        "evaluation.html": html(found),
        "confusion.svg": figure(found),
        "confusion.csv": confusion_csv(found),
        "classes.csv": render.csv_text([_classes(found)]),
    }
    return write_texts(texts, folder)


def confusion_csv(found: Evaluation) -> str:
    """Return the confusion matrix as CSV: images by true class (rows) and predicted class (columns)."""
    rows = zip(found.classes, found.matrix.tolist(), strict=True)
    records = [{"true \\ answer": name, **dict(zip(found.classes, row, strict=True))} for name, row in rows]
    return render.csv_text([Table("", [], [], records=records)])


def figure(found: Evaluation) -> str:
    """Draw the confusion matrix as SVG: numbers are images, shades their share of the row."""
    many = len(found.classes)
    shares = found.matrix.double() / found.matrix.sum(1, keepdim=True).clamp(min=1)
    side = min(12.0, max(3.2, 1.6 + 0.24 * many))
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(side, side), layout="constrained")
        axes = drawing.add_subplot()
        axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xlabel("answer")
        axes.set_ylabel("true class")
        if many <= NAMED:
            axes.set_xticks(range(many), found.classes, rotation=90, fontsize=8)
            axes.set_yticks(range(many), found.classes, fontsize=8)
            for own, said in found.matrix.nonzero().tolist():
                color = "white" if shares[own, said] > DARK else "black"
                text = str(int(found.matrix[own, said]))
                axes.text(said, own, text, color=color, ha="center", va="center", fontsize=7)
        FigureCanvasSVG(drawing).print_svg(out, metadata={"Date": None})
    return printable(out.getvalue())


def html(found: Evaluation) -> str:
    """Return the evaluation as one HTML page."""
    svg = figure(found)
    svg = svg[svg.index("<svg") :].replace("<svg", '<svg role="img" aria-label="Confusion matrix"', 1)
    return render.html(
        "cofima.classifier.web",
        "evaluation.html",
        title="cofima evaluation",
        found=found,
        confused=found.confused[:PAIRS],
        examples=EXAMPLES,
        thumbnail=_thumbnail,
        classes=_classes(found),
        svg=Markup(svg),
    )


def _thumbnail(path: Path) -> str:
    """Return a thumbnail as a data URL, so that the page is self-contained."""
    image = decode_file(path)
    image.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def _classes(found: Evaluation) -> Table:
    """Return a table of images and accuracy per class, the least accurate first."""
    images, right, by_class = found.accuracy.images, found.accuracy.right, found.accuracy.by_class
    rows = [
        Row([Cell(name), Cell(str(images[name])), Cell(f"{by_class[name]:.1f}")])
        for name in sorted(by_class, key=lambda name: by_class[name])
    ]
    records = [
        {"class": name, "images": images[name], "right": right[name], "accuracy": f"{by_class[name]:.2f}"}
        for name in images
    ]
    columns = [Column("Class", "left"), Column("Images"), Column("Accuracy %")]
    return Table("Classes", columns, rows, records=records)
