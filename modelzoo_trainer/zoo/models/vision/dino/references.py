"""References between the parts of a model: `ssl_transform.output('key')`, `heads.output(0, 1, 0)`.

An output has three numbers: of the part in its list, of its call, and of what that call returns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from modelzoo_trainer.errors import ConfigError

TRUNKS: Final = "image_model_trunks"
HEADS: Final = "heads"
LOSSES: Final = "losses"
BATCH: Final = "ssl_transform"

_KEY: Final = re.compile(rf"\s*{BATCH}\.output\(\s*(['\"])(\w+)\1\s*\)\s*")
_OUTPUT: Final = re.compile(
    rf"\s*({TRUNKS}|{HEADS})\.output\(\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)\s*"
)
_MODEL: Final = re.compile(rf"\s*({TRUNKS}|{HEADS})\.model\(\s*(\d+)\s*\)\s*")


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """An entry of the batch."""

    name: str


@dataclass(frozen=True, slots=True)
class Output:
    """What a call of a part has returned."""

    kind: str  # of the list, such as heads
    part: int
    call: int
    number: int


@dataclass(frozen=True, slots=True)
class Module:
    """A trunk or a head."""

    kind: str
    part: int

    def __str__(self) -> str:
        return f"{self.kind}.model({self.part})"


Argument = BatchEntry | Output | None
Call = tuple[Argument, ...]


def read_calls(
    given: object, where: str, earlier: Mapping[str, Sequence[Sequence[int]]]
) -> list[Call]:
    """Return the calls of a part: a list of lists of arguments.

    Args:
        given: The setting `forward_args`.
        where: Its place, for messages.
        earlier: By name of each list of parts that runs before, how many outputs each call of each
            part has.

    Raises:
        ConfigError: If it is no such list, or refers to what does not exist.
    """
    if not isinstance(given, list) or not given or not all(isinstance(one, list) for one in given):
        raise ConfigError(
            f"{where}: expected a list with the list of arguments of each call, such as "
            f"[[\"{BATCH}.output('global_view')\", null, null]], got {given!r}."
        )
    return [
        tuple(
            _argument(one, f"{where}[{row}][{column}]", earlier) for column, one in enumerate(call)
        )
        for row, call in enumerate(given)
    ]


def _argument(
    given: object, where: str, earlier: Mapping[str, Sequence[Sequence[int]]]
) -> Argument:
    if given is None:
        return None
    text = given if isinstance(given, str) else ""
    if found := _KEY.fullmatch(text):
        return BatchEntry(found[2])
    found = _OUTPUT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{where}: expected null, {BATCH}.output('key'), {TRUNKS}.output(0, 0, 0) or "
            f"{HEADS}.output(0, 0, 0), got {given!r}. The numbers are of the part, its call, and "
            f"the output of the call."
        )
    kind, part, call, number = found[1], *(int(one) for one in found.groups()[1:])
    if kind not in earlier:
        raise ConfigError(
            f"{where}: {given!r} is computed later or never. Here, only {BATCH}"
            f"{''.join(f' and {one}' for one in earlier)} can be used."
        )
    parts = earlier[kind]
    if part >= len(parts):
        problem = f"{kind} has {len(parts)} parts"
    elif call >= len(parts[part]):
        problem = f"{kind}[{part}] has {len(parts[part])} calls in forward_args"
    elif number >= parts[part][call]:
        problem = f"a call of {kind}[{part}] has {parts[part][call]} outputs"
    else:
        return Output(kind, part, call, number)
    raise ConfigError(f"{where}: {given!r} does not exist: {problem}. Numbers begin with 0.")


def read_module(given: object, where: str, sizes: Mapping[str, int]) -> Module:
    """Return the trunk or head that a setting names.

    Args:
        given: The setting.
        where: Its place, for messages.
        sizes: How many parts each list has.

    Raises:
        ConfigError: If it names none.
    """
    found = _MODEL.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(
            f"{where}: expected {TRUNKS}.model(0) or {HEADS}.model(0), with the number of the "
            f"part, got {given!r}."
        )
    kind, part = found[1], int(found[2])
    if part >= sizes[kind]:
        raise ConfigError(
            f"{where}: {given!r} does not exist: {kind} has {sizes[kind]} parts. Numbers begin "
            f"with 0."
        )
    return Module(kind, part)
