"""Grids: many runs of one recipe, on this machine or on a cluster."""
