"""Pure functions on weights: averages, distances, Fisher information."""
