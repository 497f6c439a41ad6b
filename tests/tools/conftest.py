"""The fixtures of tests of callbacks."""

from tests.callbacks.conftest import batches, history, make, net

__all__ = ["batches", "history", "make", "net"]
