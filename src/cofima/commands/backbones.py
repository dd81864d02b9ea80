"""What ``cofima list backbones`` shows."""

from rich.table import Table

from cofima.models import inventory

WIDE = 150  # columns of a terminal with room for timm's own names


def table(width: int) -> Table:
    """Return the backbones with where their weights are, those that work without a network first."""
    wide = width >= WIDE
    note = None if wide else f"timm's own names: in a terminal of {WIDE} columns (COLUMNS={WIDE})"
    shown = Table(box=None, pad_edge=False, caption=note, caption_justify="left")
    for title in ("name", *["timm name"] * wide, "size", "MB", "pixels", "pre-trained on", "weights"):
        shown.add_column(title, overflow="fold", no_wrap=title in ("name", "size", "MB"))
    for entry in sorted(inventory.entries(), key=lambda entry: not entry.offline):
        count = entry.parameters
        size = (f"{count / 1e6:.1f} M", f"{count * 4 / 1e6:.0f}") if count else ("", "")
        names = (entry.name, *[entry.timm] * wide)
        shown.add_row(*names, *size, str(entry.size), entry.pretraining, entry.where)
    shown.add_row("any timm name", *["NAME.TAG"] * wide, "", "", "", "", "hub, or model.checkpoint=FILE")
    shown.add_row("hf-hub:OWNER/NAME", *[""] * wide, "", "", "", "", "hub")
    return shown
