"""From whatever holds an image to pixels in one format."""
