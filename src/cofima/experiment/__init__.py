"""Runs and grids of runs: from a configuration to a trained model folder."""
