"""Grids: many runs of one recipe, on this machine or a cluster."""
