"""The classifier that a program uses: learn, predict, extend, edit, export, merge."""
