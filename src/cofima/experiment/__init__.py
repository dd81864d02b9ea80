"""Runs and grids of runs: from a configuration to a learned model folder."""
