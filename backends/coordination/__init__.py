"""Several processes that act as one: they meet, agree, see failures, and end together."""
