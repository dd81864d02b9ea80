"""The commands that need more than a few lines, one file each; cli.py joins them."""
