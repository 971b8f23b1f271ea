"""A run on disk: its directory, checkpoints, and what a failed step leaves."""
