"""Packaged recipes."""
