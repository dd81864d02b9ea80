"""The web page of a model."""
