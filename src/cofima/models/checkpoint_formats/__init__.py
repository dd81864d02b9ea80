"""Foreign checkpoint files: formats, key layouts and their conversion to timm's names."""
