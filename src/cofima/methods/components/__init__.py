"""Components shared by methods."""
