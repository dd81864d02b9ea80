"""Decoding of images to pixels in one format, and their cache."""
