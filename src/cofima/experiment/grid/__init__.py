"""Grids of runs: cells, scheduling, executors, estimates."""
