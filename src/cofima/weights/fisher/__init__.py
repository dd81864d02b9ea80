"""Diagonal Fisher information of any classifier."""
