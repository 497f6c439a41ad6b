"""Process-wide settings, such as torch's flags, held by several owners for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, get_args

import torch

from .backend import Backend, Precision
from .errors import BackendError, suggest


class Overrides:
    """Set process-wide values, and restore the previous ones.

    Owners may release a value in any order: the last remaining owner's value is active, and finally
    the original one.
    """

    def __init__(self, read: Callable[[str], Any], write: Callable[[str, Any], None]) -> None:
        self._read = read
        self._write = write
        self._before: dict[str, Any] = {}
        self._held: dict[str, dict[object, Any]] = {}

    def hold(self, values: Mapping[str, Any]) -> Callable[[], None]:
        """Set values, all or none.

        Returns:
            A function that releases them. Idempotent.
        """
        token = object()
        done: list[str] = []

        def let_go() -> None:
            while done:
                self._drop(done.pop(), token)

        try:
            for name, value in values.items():
                self._take(name, token, value)
                done.append(name)
        except BaseException:
            let_go()
            raise
        return let_go

    @contextmanager
    def held(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Set values inside the block."""
        let_go = self.hold(values)
        try:
            yield
        finally:
            let_go()

    def _take(self, name: str, token: object, value: Any) -> None:
        before = self._before[name] if name in self._before else self._read(name)
        self._write(name, value)
        self._before[name] = before
        self._held.setdefault(name, {})[token] = value

    def _drop(self, name: str, token: object) -> None:
        held = self._held[name]
        was_last = next(reversed(held)) is token
        del held[token]
        if not held:
            del self._held[name]
            self._write(name, self._before.pop(name))
        elif was_last:
            self._write(name, held[next(reversed(held))])


_WORDS: Final = {bool: "true or false", int: "an integer > 0"}


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting of torch."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    fits: type[int] | tuple[str, ...] = bool  # the type of its value, or the allowed values

    def problem(self, value: Any) -> str | None:
        """Return the problem of a value; None if it is valid."""
        if isinstance(self.fits, tuple):
            if value in self.fits and isinstance(value, str):
                return None
            return f"is {value!r}; expected {', '.join(map(repr, self.fits))}."
        if type(value) is self.fits and (isinstance(value, bool) or value > 0):
            return None
        return f"is {value!r}; expected {_WORDS[self.fits]}."


def is_switch(name: object) -> bool:
    """Return whether a name belongs to torch's switches, known or not."""
    return isinstance(name, str) and name.startswith("torch.")


def switch_names() -> tuple[str, ...]:
    """Return the names of all switches in this release of torch."""
    return tuple(_switches())


def switch_problem(name: str, value: Any) -> str | None:
    """Return the problem of a switch; None if it is valid.

    `name`: qualified, such as "torch.backends.cudnn.benchmark".
    """
    switch = _switches().get(name)
    if switch is None:
        return f"is not a known switch of torch {torch.__version__}. {suggest(name, _switches())}"
    return switch.problem(value)


def held_switches(values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return the context in which switches are set."""
    return _overrides().held(values)


def hold_switches(backend: Backend, values: Mapping[str, Any]) -> None:
    """Set switches until an open backend is closed.

    The backend restores them before its own.

    Raises:
        BackendError: If torch rejects one.
    """
    backend._undo.append(_overrides().hold(values))


def _read(name: str) -> Any:
    return _switches()[name].read()


def _write(name: str, value: Any) -> None:
    try:
        _switches()[name].write(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BackendError(f"{name}: torch rejects {value!r}: {error}") from None


@cache
def _overrides() -> Overrides:
    return Overrides(_read, _write)


@cache
def _switches() -> dict[str, Switch]:
    found: dict[str, Switch] = {}
    for name, fits in _ATTRIBUTES.items():
        owner, _, attribute = name.removeprefix("torch.").rpartition(".")
        home: Any = torch
        for part in owner.split("."):
            home = getattr(home, part, None)
        if home is not None and hasattr(home, attribute):
            found[name] = Switch(*_access(home, attribute), fits)
    for kind in ("flash", "math", "mem_efficient", "cudnn"):
        read = getattr(torch.backends.cuda, f"{kind}_sdp_enabled")
        write = getattr(torch.backends.cuda, f"enable_{kind}_sdp")
        found[f"torch.backends.cuda.enable_{kind}_sdp"] = Switch(read, write)
    found["torch.set_float32_matmul_precision"] = Switch(
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        get_args(Precision),
    )
    found["torch.set_num_threads"] = Switch(torch.get_num_threads, torch.set_num_threads, int)
    found["torch.use_deterministic_algorithms"] = Switch(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    )
    found["torch.autograd.set_detect_anomaly"] = Switch(
        torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    )
    return found


def _access(home: Any, attribute: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def write(value: Any) -> None:
        setattr(home, attribute, value)

    def read() -> Any:
        return getattr(home, attribute)

    return read, write


_MATMUL: Final = "torch.backends.cuda.matmul"
_ATTRIBUTES: Final[dict[str, type[int] | tuple[str, ...]]] = {
    "torch.backends.cudnn.allow_tf32": bool,
    "torch.backends.cudnn.benchmark": bool,
    "torch.backends.cudnn.benchmark_limit": int,
    "torch.backends.cudnn.deterministic": bool,
    "torch.backends.cudnn.enabled": bool,
    f"{_MATMUL}.allow_tf32": bool,
    f"{_MATMUL}.allow_fp16_accumulation": bool,
    f"{_MATMUL}.allow_fp16_reduced_precision_reduction": bool,
    f"{_MATMUL}.allow_bf16_reduced_precision_reduction": bool,
    "torch.backends.mkldnn.deterministic": bool,
    "torch.backends.mkldnn.enabled": bool,
    "torch.backends.opt_einsum.enabled": bool,
    "torch.backends.opt_einsum.strategy": ("auto", "greedy", "optimal"),
}
