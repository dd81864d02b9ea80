"""Foundations without images or networks: errors, progress, seeds, files, locks, processes."""
