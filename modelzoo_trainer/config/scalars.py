"""The plain scalars of YAML 1.2: which text is a number, a boolean, null, or just text."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

TAG: Final = "tag:yaml.org,2002:"

_NULL: Final = re.compile(r"(?:null|Null|NULL|~)?")
_BOOL: Final = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT: Final = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)")
_FLOAT: Final = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
)
_KINDS: Final = (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT))

GROUPED: Final = r"[-+]?[0-9]+(_[0-9]+)+"  # text in YAML 1.2, a number where one is expected

MAX_DIGITS: Final = 300  # more than any float has; longer ones take quadratic time to read


def kind_of(text: str) -> str:
    """Return "null", "bool", "int", "float" or "str": what `text` is without quotes.

    Args:
        text: A plain scalar. `1e-4` is a float; `on`, `no` and `12:30:45` are text; `0123` is 123.
    """
    for kind, pattern in _KINDS:
        if pattern.fullmatch(text):
            return kind
    return "str"


def value_of(kind: str, text: str) -> bool | int | float | str | None:
    """Return the value of a scalar.

    Args:
        kind: As `kind_of` says, or as a tag in the file demands.
        text: The scalar.

    Raises:
        ValueError: If `text` is not of that kind, or is a number that Python cannot hold; the
            message says what is wrong.
    """
    if kind == "str":
        return text
    natural = kind_of(text)
    if natural != kind and (kind, natural) != ("float", "int"):
        raise ValueError(f"{text!r} is not of type {kind}.")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    return _int(text) if kind == "int" else _float(text)


def whole_number(text: str) -> int | None:
    """Return the integer that a plain scalar such as `1e3` or `1_000` means where one is expected.

    Args:
        text: A plain scalar.

    Returns:
        None if it means none: `1.5e0`, or a number that is no integer without an exponent (`1.0`).
    """
    if len(text) > MAX_DIGITS:
        return None
    if re.fullmatch(GROUPED, text):
        return int(text.replace("_", ""))
    if kind_of(text) != "float" or "e" not in text.lower():
        return None
    number = Decimal(text)
    return int(number) if number == number.to_integral_value() else None


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too long; {MAX_DIGITS} are read.")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text, base)


def _float(text: str) -> float:
    if text.lower().endswith((".inf", ".nan")):
        return float(text.replace(".", ""))
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a float; write .inf for infinity.")
    return number
