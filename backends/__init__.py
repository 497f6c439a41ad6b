"""Devices behind one contract; knows nothing of the trainer.

`make_backend("cpu")` makes one; `Backend` is the contract, and `FakeBackend` (in `fake.py`) a
device for tests that forbids host reads inside a step.

The names below are imported when they are first used: `backends.launch` is asked before torch is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import Backend, Caps
    from .collectives import collective_of
    from .compile import CompileOptions
    from .errors import BackendError, BackendUnavailable, HostReadError
    from .failures import Failure
    from .fake_processes import backend_on_paper, is_for_real, processes_on_paper
    from .processes import Processes, join, joined
    from .reads import host_value
    from .seeds import Stream, step_seed
    from .select import backend_names, make_backend
    from .trees import map_tensors

_HOMES = {
    "backend": ("Backend", "Caps"),
    "collectives": ("collective_of",),
    "compile": ("CompileOptions",),
    "errors": ("BackendError", "BackendUnavailable", "HostReadError"),
    "failures": ("Failure",),
    "fake_processes": ("backend_on_paper", "is_for_real", "processes_on_paper"),
    "processes": ("Processes", "join", "joined"),
    "reads": ("host_value",),
    "seeds": ("Stream", "step_seed"),
    "select": ("backend_names", "make_backend"),
    "trees": ("map_tensors",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "Caps",
    "CompileOptions",
    "Failure",
    "HostReadError",
    "Processes",
    "Stream",
    "backend_names",
    "backend_on_paper",
    "collective_of",
    "host_value",
    "is_for_real",
    "join",
    "joined",
    "make_backend",
    "map_tensors",
    "processes_on_paper",
    "step_seed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
