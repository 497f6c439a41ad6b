"""Data processors by name, the token cache under them, and batches as seen from outside."""

from modelzoo_trainer.data.batches import batch_size_of
from modelzoo_trainer.data.registry import PROCESSORS, processor_class

__all__ = ["PROCESSORS", "batch_size_of", "processor_class"]
