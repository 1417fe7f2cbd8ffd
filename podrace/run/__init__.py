"""One run: its directory, loop, checkpoints, metrics and evaluations."""
