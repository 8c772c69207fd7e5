"""The tasks of a run's startup graph, a module per thing that starts; ``training.start`` says what waits for what."""
