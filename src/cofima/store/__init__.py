"""The model and the folder that it is kept in."""
