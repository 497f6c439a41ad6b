"""Coordination of ranks: rendezvous, consensus, failure detection and a common end."""
