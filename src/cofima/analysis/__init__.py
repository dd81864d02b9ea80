"""The paper's analyses: what averaging does to weights, losses and accuracies.

Each has a file for what is computed, draws with :mod:`cofima.analysis.plots`, and writes a figure and a CSV
file of unrounded numbers.
"""
