"""Data processors by name, their base class, and helpers for batches."""

from modelzoo_trainer.data.batches import batch_size_of
from modelzoo_trainer.data.processor import (
    BatchDataset,
    DataProcessor,
    LoadingOptions,
    TensorRows,
)
from modelzoo_trainer.data.registry import PROCESSORS, processor_class
from modelzoo_trainer.data.sharded_stream import ShardedStream
from modelzoo_trainer.data.static_shapes import PadLastBatch, PadToBuckets, bucket_lengths

__all__ = [
    "PROCESSORS",
    "BatchDataset",
    "DataProcessor",
    "LoadingOptions",
    "PadLastBatch",
    "PadToBuckets",
    "ShardedStream",
    "TensorRows",
    "batch_size_of",
    "bucket_lengths",
    "processor_class",
]
