"""Models over several processes: replicated, sharded, split, or several of these."""
