"""The exceptions of backends, and what their messages suggest."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final


class BackendError(RuntimeError):
    """A device or its runtime failed, or was asked for what it cannot do."""


class BackendUnavailable(BackendError):
    """The device that was asked for is not there."""


class HostReadError(BackendError):
    """A value was read on the host inside the traced step."""


OUT_OF_MEMORY_ADVICE: Final = (
    "Lower batch_size and raise loop.grad_accum_steps by the same factor (the update stays the "
    "same), shorten the sequences, use precision: {fp16_type: bfloat16}, or a smaller model."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a device or on the host."""
    import torch  # not above: the command line knows these exceptions before it needs torch

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


def check_choice(option: str, value: object, known: Sequence[object]) -> None:
    """Check the value of an option of a backend.

    Raises:
        BackendError: If it is none of those known.
    """
    if not any(_is_choice(value, one) for one in known):
        choices = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise BackendError(f"backend.{option} is {value!r}. Use {choices}.")


def _is_choice(value: object, one: object) -> bool:
    """Return whether they are the same, and not 1 and True; a string may be an enum's."""
    is_alike = isinstance(value, type(one)) and isinstance(value, bool) == isinstance(one, bool)
    return is_alike and value == one


def suggest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a sentence that helps with a wrong name, whatever its case.

    `cutoff`: least similarity, 0 to 1, of a suggestion (`difflib`'s ratio).

    Returns:
        "Did you mean 'x'?" if one name is near, else "Known: a, b, c.".
    """
    names = sorted(set(known))
    lowered = {name.lower(): name for name in names}
    near = get_close_matches(given.lower(), lowered, n=1, cutoff=cutoff)
    if near:
        return f"Did you mean {lowered[near[0]]!r}?"
    return f"Known: {', '.join(names)}." if names else "Nothing is known here."
