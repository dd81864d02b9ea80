"""Continual averaging in other training code: plain PyTorch loops, and callbacks of frameworks."""
