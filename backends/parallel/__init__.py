"""Models over several ranks: replicated, sharded, tensor-parallel, or combinations."""
