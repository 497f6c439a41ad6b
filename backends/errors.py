"""Exceptions of backends, and hints in their messages."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final


class BackendError(RuntimeError):
    """A device or its runtime failed, or does not support what was requested."""


class BackendUnavailable(BackendError):
    """The requested device does not exist."""


class UnsplittableBatch(BackendError):
    """A batch has a shape that cannot be split over the processes as requested."""


class HostReadError(BackendError):
    """A value was read on the host inside the traced step."""


OUT_OF_MEMORY_ADVICE: Final = (
    "Lower batch_size and raise loop.grad_accum_steps by the same factor (the update stays the "
    "same), set backend.activation_checkpointing: full, use precision: {fp16_type: bfloat16}, "
    "shorten the sequences, or shard the model over several devices (backend.parallel: "
    "{shard: -1}). `modelzoo-trainer plan` predicts the memory of each."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, on a device or on the host."""
    import torch  # lazy: the command line uses these exceptions without torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = ("can't allocate memory", "RESOURCE_EXHAUSTED")  # host, XLA
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def is_too_large(error: BaseException) -> bool:
    """Return whether an error means that a size exceeds the host's memory or integers."""
    if isinstance(error, (MemoryError, OverflowError)):
        return True
    said = ("can't allocate memory", "size calculation overflowed", "Overflow when unpacking")
    kinds = (RuntimeError, TypeError, ValueError)
    return isinstance(error, kinds) and any(words in str(error) for words in said)


def check_choice(option: str, value: object, known: Sequence[object]) -> None:
    """Check the value of a backend option.

    Raises:
        BackendError: If it is not one of those known.
    """
    if not any(_is_choice(value, one) for one in known):
        choices = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise BackendError(f"backend.{option}: expected {choices}, got {value!r}.")


def check_count(option: str, value: object, unit: str = "") -> None:
    """Check a backend option that is an integer of at least 0, or None.

    Raises:
        BackendError: If it is neither.
    """
    if value is not None and (type(value) is not int or value < 0):
        raise BackendError(f"backend.{option}: expected an integer >= 0{unit}, got {value!r}.")


def check_flag(option: str, value: object) -> bool:
    """Return the value of a backend option that is true or false.

    Raises:
        BackendError: If it is neither.
    """
    if not isinstance(value, bool):
        raise BackendError(f"backend.{option}: expected true or false, got {value!r}.")
    return value


def _is_choice(value: object, one: object) -> bool:
    """Return whether they are equal, but not 1 and True; a string may equal an enum's value."""
    is_alike = isinstance(value, type(one)) and isinstance(value, bool) == isinstance(one, bool)
    return is_alike and value == one


def in_bytes(num: float) -> str:
    """Format a number of bytes with a unit, such as "12.3 GiB"."""
    value, power = float(num), 0
    while value >= 1023.95 and power < 5:
        value, power = value / 1024, power + 1
    return f"{value:.0f} B" if not power else f"{value:.1f} {'KMGTP'[power - 1]}iB"


def suggest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a hint for a misspelled name, ignoring case.

    `cutoff`: minimum similarity, 0 to 1, of a suggestion (`difflib`'s ratio).

    Returns:
        "Did you mean 'x'?" if a name is close, else "Known: a, b, c.".
    """
    names = sorted(set(known))
    lowered = {name.lower(): name for name in names}
    near = get_close_matches(given.lower(), lowered, n=1, cutoff=cutoff)
    if near:
        return f"Did you mean {lowered[near[0]]!r}?"
    return f"Known: {', '.join(names)}." if names else "No names are known."
