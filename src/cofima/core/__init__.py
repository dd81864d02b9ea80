"""Foundations: errors, progress, random streams, files, locks, processes; no images, no networks."""
