"""Configurations that come with the package."""
