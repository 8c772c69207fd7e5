"""A training run: its loop, its checkpoints, its end."""
