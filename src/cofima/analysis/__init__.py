"""The paper's analyses of averaging: its effect on weights, losses and accuracies.

Each analysis has its own module, plots with :mod:`cofima.analysis.plots`, and writes figures and a CSV file
of unrounded numbers.
"""
