"""Data processors by name, their base class, and helpers for batches."""

from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.loading.batches import batch_size_of
from modelzoo_trainer.loading.sharded_stream import ShardedStream
from modelzoo_trainer.zoo.data.processor import (
    DataProcessor,
    LoadingArguments,
    LoadingOptions,
    TensorRows,
)
from modelzoo_trainer.zoo.data.registry import PROCESSORS, processor_class
from modelzoo_trainer.zoo.data.static_shapes import PadLastBatch, PadToBuckets, bucket_lengths

__all__ = [
    "PROCESSORS",
    "BatchDataset",
    "DataProcessor",
    "LoadingArguments",
    "LoadingOptions",
    "PadLastBatch",
    "PadToBuckets",
    "ShardedStream",
    "TensorRows",
    "batch_size_of",
    "bucket_lengths",
    "processor_class",
]
