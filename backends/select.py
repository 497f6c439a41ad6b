"""Create the backend of a device by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

import torch
import torch.distributed as dist

from .backend import Backend
from .blocks import CompileOptions
from .coordination.launch import read_launch
from .errors import BackendError, BackendUnavailable, suggest
from .parallel.config import TIMEOUT_S, ParallelSettings, check_timeout

# name -> module and class; modules are imported lazily.
_KNOWN: Final[dict[str, tuple[str, str]]] = {
    "cpu": (".cpu", "CpuBackend"),
    "cuda": (".cuda", "CudaBackend"),
    "fake": (".fake", "FakeBackend"),
    "meta": (".meta", "MetaBackend"),
    "xla": (".xla.backend", "XlaBackend"),
}
_SHARED: Final = (*ParallelSettings.OPTIONS, "timeout")  # only used with several ranks
_ALIASES: Final = {"gpu": "cuda"}
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# Kinds of torch.accelerator served by one class; `auto` detects which are available.
_ACCELERATORS: Final = frozenset({"xpu", "mps", "hpu", "npu", "tpu", "neuron"})


def backend_names() -> list[str]:
    """Return the device names for `make_backend`."""
    return sorted({*_KNOWN, *_ALIASES, *_ACCELERATORS, "auto"})


def make_backend(device: str | type[Backend], options: Mapping[str, Any] | None = None) -> Backend:
    """Create the backend of a device; nothing starts before its `open`.

    Args:
        device: One of `backend_names`, in any case; "auto" = the accelerator found by torch, else
            the kind in PJRT_DEVICE for torch_xla (except the CPU), else the CPU. Or a class.
        options: The backend's arguments.

    Raises:
        BackendError: If the name or an option is unknown, or the class is incomplete.
        BackendUnavailable: If the device does not exist.
    """
    if isinstance(device, str):
        name, cls, arguments = _class_of(device)
        shown = repr(device)
    else:
        name, cls, arguments = "", device, {}
        shown = cls.__name__
        _check_complete(cls)
    given = _checked(cls, dict(options or {}), _SHARED if cls.caps.several_ranks else ())
    if not (cls.is_available(name) if name in _ACCELERATORS else cls.is_available()):  # type: ignore[call-arg]
        raise BackendUnavailable(f"device: {shown} is not available: {_why_not(device)}")
    if not _has_others():
        return (
            _alone(cls, arguments, given) if cls.caps.several_ranks else cls(**arguments, **given)
        )
    if not cls.caps.several_ranks:
        raise BackendError(
            f"device: {shown} supports a single process, but this is one of several. Start it "
            f"without torchrun, or use device: cpu, gpu or auto."
        )
    return _over_ranks(cls)(**arguments, **given)


def _why_not(device: str | type[Backend]) -> str:
    if isinstance(device, str):
        return (
            f"torch {torch.__version__} finds {_found()}. Use device: cpu or auto, or install a "
            f"torch build for it."
        )
    return "its is_available() is False. Use device: cpu or auto."


def _check_complete(cls: type[Backend]) -> None:
    """Raise a `BackendError` if a class lacks what `Backend` leaves to its subclasses."""
    lacks = sorted(cls.__abstractmethods__) + ["name"] * (not hasattr(cls, "name"))
    if lacks:
        raise BackendError(
            f"device: {cls.__name__} is not a complete backend. Define {', '.join(lacks)}."
        )


def _over_ranks(cls: type[Backend]) -> type[Backend]:
    """Return the version of a backend for several ranks."""
    layer: type[Backend] = importlib.import_module(".parallel.backend", __package__).ParallelBackend
    return type(f"Parallel{cls.__name__}", (layer, cls), {"__module__": cls.__module__})


def _class_of(device: str) -> tuple[str, type[Backend], dict[str, Any]]:
    """Return a device's canonical name, its backend class, and that class's arguments."""
    name = device.lower()
    name = _ALIASES.get(name, name)
    if name == "auto":
        name = _find()
    arguments: dict[str, Any] = {}
    cls: type[Backend]
    if name == "tpu" and not _is_installed("torch_tpu"):
        name, arguments = "xla", {"kind": "tpu"}
    if name == "xla" and not _is_installed("torch_xla"):
        raise BackendUnavailable(_without_xla(device))
    if name in _KNOWN:
        module, cls_name = _KNOWN[name]
        cls = getattr(importlib.import_module(module, __package__), cls_name)
    elif name in _ACCELERATORS:
        cls = importlib.import_module(".accelerator", __package__).AcceleratorBackend
        arguments = {"kind": name}
    else:
        advice = _of_index(name) or _near(name)
        raise BackendUnavailable(f"device: {device!r} is not a backend. {advice}")
    return name, cls, arguments


def _of_index(name: str) -> str:
    """Return what to do instead of a device with an index, such as cuda:0; "" for others."""
    kind, colon, index = name.partition(":")
    if not colon or kind not in backend_names() or not (index.isdecimal() or not index):
        return ""
    start = f"A device has no index here: use device: {kind}"
    if not index or kind not in {"cuda", "gpu", *_ACCELERATORS}:
        return f"{start}."
    choice = f"To choose one, set backend.index: {index}"
    if _ALIASES.get(kind, kind) == "cuda":
        choice = f"To choose the GPU, set the environment variable {_VISIBLE}={index}"
    return f"{start}. {choice}."


def _near(name: str) -> str:
    """Return a similar name; for a name like none or a class, also how to give a class."""
    advice = suggest(name, backend_names())
    if advice.startswith("Did") and name.isalpha():
        return advice
    return f"{advice} For a backend of your own, give its dotted path, e.g. package.module.Class."


def _has_others() -> bool:
    """Return whether there are several ranks.

    Raises:
        BackendError: If the launcher's environment is invalid.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return read_launch() is not None


def _alone(cls: type[Backend], arguments: dict[str, Any], given: dict[str, Any]) -> Backend:
    """Create the backend of a single process; options for several ranks must allow that."""
    settings = ParallelSettings.from_options(
        {name: given.pop(name) for name in ParallelSettings.OPTIONS if name in given}
    )
    settings.sizes(1)
    check_timeout(given.pop("timeout", TIMEOUT_S))
    return cls(**arguments, **given)


def _checked(cls: type[Backend], options: dict[str, Any], others: Iterable[str]) -> dict[str, Any]:
    known = _options_of(cls)
    for key in options:
        if key not in known and key not in others:
            advice = suggest(str(key), {*known, *others})
            raise BackendError(f"backend.{key}: no such option of {cls.name}. {advice}")
    for key, is_required in known.items():
        if is_required and key not in options:
            raise BackendError(f"backend.{key}: missing; {cls.__name__} requires it.")
    _read_compile(options)
    return options


def _read_compile(options: dict[str, Any]) -> None:
    """Replace the option `compile`, a name or a mapping, by its object."""
    chosen = options.get("compile")
    if isinstance(chosen, str):
        options["compile"] = CompileOptions(target=chosen)  # type: ignore[arg-type]
    elif isinstance(chosen, Mapping):
        known = [field.name for field in fields(CompileOptions)]
        for key in chosen:
            if key not in known:
                advice = suggest(str(key), known)
                raise BackendError(f"backend.compile.{key}: no such option. {advice}")
        options["compile"] = CompileOptions(**chosen)


def _options_of(cls: type[Backend]) -> dict[str, bool]:
    """Return the options of a backend by name, and whether they are required."""
    options: dict[str, bool] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for one in parameters:
            if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD):
                options.setdefault(one.name, one.default is one.empty)
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break  # it passes on none to its base
    options.pop("kind", None)
    return options


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _without_xla(device: str) -> str:
    other = ", 'modelzoo-trainer[tpu]' (torch_tpu, torch 2.11 or newer)" * (device.lower() == "tpu")
    return (
        f"device: {device!r} requires torch_xla, which is not installed. pip install "
        f"'modelzoo-trainer[xla]' (requires torch 2.9){other} in a separate environment, or use "
        f"device: cpu or auto."
    )


def _find() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return accelerator.type
    kind = os.environ.get("PJRT_DEVICE", "cpu").lower()
    return "xla" if kind not in ("", "cpu") and _is_installed("torch_xla") else "cpu"


def _found() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "no accelerator (CPU only)"
    return f"{torch.accelerator.device_count()} x {accelerator.type}"
