"""The image classifier: learn, predict, extend, edit, export, merge."""
