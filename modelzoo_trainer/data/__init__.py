"""Data processors by name, the token cache they use, and helpers for batches."""

from modelzoo_trainer.data.batches import batch_size_of
from modelzoo_trainer.data.registry import PROCESSORS, processor_class
from modelzoo_trainer.data.sharded_stream import ShardedStream
from modelzoo_trainer.data.static_shapes import PadLastBatch, PadToBuckets, bucket_lengths

__all__ = [
    "PROCESSORS",
    "PadLastBatch",
    "PadToBuckets",
    "ShardedStream",
    "batch_size_of",
    "bucket_lengths",
    "processor_class",
]
