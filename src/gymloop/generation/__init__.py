"""Generation: the engine protocol, the embedded engine, and the server in front of either."""
