"""Images on disk become tasks: datasets, streams of tasks, transforms."""
