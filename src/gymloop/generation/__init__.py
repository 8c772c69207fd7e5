"""Generation: the engine protocol, and the embedded engine behind it."""
