"""Devices behind one contract; knows nothing of the trainer.

`make_backend("cpu")` makes one; `Backend` is the contract, and `FakeBackend` (in `fake.py`) a
device for tests that forbids host reads inside a step.
"""

from .backend import Backend, Caps
from .compile import CompileOptions
from .errors import BackendError, BackendUnavailable, HostReadError
from .reads import host_value
from .seeds import Stream, step_seed
from .select import backend_names, make_backend
from .trees import map_tensors

__all__ = [
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "Caps",
    "CompileOptions",
    "HostReadError",
    "Stream",
    "backend_names",
    "host_value",
    "make_backend",
    "map_tensors",
    "step_seed",
]
