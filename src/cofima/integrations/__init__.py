"""Continual averaging inside other people's training: a plain loop, and the callbacks of frameworks."""
