"""Merge checkpoints, files or model folders, tensor by tensor; and measure which weights matter to them."""
