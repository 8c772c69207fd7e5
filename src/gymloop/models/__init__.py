"""Models: where their folders come from and how they are opened."""
