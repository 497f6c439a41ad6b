"""The dotted flags of Cerebras hardware.

Only the micro-batch size has an effect here; the others are validated and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from modelzoo_trainer.errors import suggest

MICRO_BATCH_SIZE: Final = "csx.performance.micro_batch_size"

_WORDS: Final = {int: "an integer", bool: "true or false", str: "a string", dict: "a mapping"}
_KNOWN: Final[dict[str, tuple[type, ...]]] = {
    "csx.debug.act_memory_gi": (int,),
    "csx.debug.cmd_memory_gi": (int,),
    "csx.debug.compile_crd_memory_gi": (int,),
    "csx.debug.debug_args": (dict, str),
    "csx.debug.execute_crd_memory_gi": (int,),
    "csx.debug.fabric_type_blacklist": (str,),
    "csx.debug.implicit_cast_cb16_to_fp32": (bool,),
    "csx.debug.ini": (dict, str),
    "csx.debug.lazy_initialization": (bool,),
    "csx.debug.log_initialization": (bool,),
    "csx.debug.retrace_every_iteration": (bool,),
    "csx.debug.wgt_memory_gi": (int,),
    "csx.debug.wrk_memory_gi": (int,),
    "csx.performance.micro_batch_size": (int, str, dict),
    "csx.performance.transfer_processes": (int,),
    "csx.precision.optimization_level": (int,),
}


def is_flag(key: object) -> bool:
    """Return whether a configuration key is such a flag."""
    return isinstance(key, str) and key.startswith("csx.")


def flag_problem(key: str, value: Any, others: Iterable[str] = ()) -> str | None:
    """Return what is wrong with a flag; None if it is valid.

    Args:
        key: Its dotted name.
        value: Its value; None = not set.
        others: Other valid names.
    """
    types = _KNOWN.get(key)
    if types is None:
        advice = suggest(key, _KNOWN, cutoff=0.85)
        if is_flag(key) and not advice.startswith("Did"):
            return None  # of an unknown version
        return f"is not a flag. {suggest(key, [*_KNOWN, *others])}"
    if value is None:
        return None
    if key == MICRO_BATCH_SIZE:
        return None if _is_size(value) else _SIZES.format(value)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        fits = " or ".join(_WORDS[kind] for kind in types)
        return f"is {value!r}; expected {fits}."
    return None


_SIZES: Final = (
    "is {!r}; expected an integer > 0, 'auto', 'explore', a mapping with explore, or None (null)."
)


def _is_size(value: Any) -> bool:
    if isinstance(value, Mapping):
        bounds = value.get("explore")
        return (
            set(value) == {"explore"}
            and isinstance(bounds, Mapping)
            and set(bounds) <= {"min", "max"}
            and all(_is_count(bound) for bound in bounds.values())
        )
    return value in ("auto", "explore") or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def micro_batch_size(flags: Mapping[str, Any]) -> int | None:
    """Return the micro-batch size; None = the whole batch.

    Args:
        flags: Values by name. "auto" and "explore" are for a compiler that does not exist here.
    """
    value = flags.get(MICRO_BATCH_SIZE)
    return value if isinstance(value, int) else None
