"""A recipe is checked whole before anything starts, and compiles to a Plan that nobody mutates."""
