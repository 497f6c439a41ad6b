"""The console output of a run: its start, progress and results."""
