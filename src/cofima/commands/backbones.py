"""What ``cofima list backbones`` shows."""

from rich.table import Table

from cofima.models import inventory


def table() -> Table:
    """Return the backbones with where their weights are, those that work without a network first."""
    shown = Table(box=None, pad_edge=False)
    for title in ("name", "timm name", "parameters", "MB", "pixels", "pre-trained on", "weights"):
        shown.add_column(title, overflow="fold", no_wrap=title == "name")  # names are there to be copied
    for entry in sorted(inventory.entries(), key=lambda entry: not entry.offline):
        count = entry.parameters
        size = (f"{count / 1e6:.1f} M", f"{count * 4 / 1e6:.0f}") if count else ("", "")
        shown.add_row(entry.name, entry.timm, *size, str(entry.size), entry.pretraining, entry.where)
    shown.add_row("any timm name", "NAME.TAG", "", "", "", "", "hub, or model.checkpoint=FILE")
    shown.add_row("hf-hub:OWNER/NAME", "", "", "", "", "", "hub")
    return shown
