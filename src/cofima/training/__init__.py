"""Training loop, evaluation, checkpoints, cached features."""
