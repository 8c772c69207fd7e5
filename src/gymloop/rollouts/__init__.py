"""Rollouts: what is recorded of them, and how they are run."""
