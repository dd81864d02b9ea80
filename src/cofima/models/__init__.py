"""Backbones, and heads that grow with new classes."""
