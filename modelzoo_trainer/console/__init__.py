"""What a run shows on the console: its start, how far it is, its end."""
