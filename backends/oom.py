"""Out of memory: how to know it, and what to lower."""

from typing import Final

import torch

OUT_OF_MEMORY_ADVICE: Final = (
    "Lower batch_size and raise loop.grad_accum_steps by the same factor (the update stays the "
    "same), shorten the sequences, use precision: {fp16_type: bfloat16}, or a smaller model."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = ("can't allocate memory", "RESOURCE_EXHAUSTED")  # the host's words, and XLA's
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def is_too_large(error: BaseException) -> bool:
    """Return whether an error says that a size is more than the host can hold, or count."""
    if isinstance(error, (MemoryError, OverflowError)):
        return True
    said = ("can't allocate memory", "size calculation overflowed", "Overflow when unpacking")
    kinds = (RuntimeError, TypeError, ValueError)
    return isinstance(error, kinds) and any(words in str(error) for words in said)
