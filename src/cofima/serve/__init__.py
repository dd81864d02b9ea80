"""A classifier in use: learned from a folder of photographs, extended later, and asked."""
