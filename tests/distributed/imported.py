"""Imports, in the process that others are forked from, what every run needs."""

from contextlib import suppress

import torch._dynamo  # by the first optimizer: more than half a second
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.nn.parallel

import backends.parallel.backend  # noqa: F401

with suppress(ImportError):
    import torch.distributed.fsdp  # noqa: F401
