"""Merging of model folders, checkpoints and LoRA adapters."""
