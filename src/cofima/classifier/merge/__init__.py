"""Merging of models and checkpoints."""
