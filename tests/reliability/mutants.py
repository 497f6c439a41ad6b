"""JSON and bytes, changed at random."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any, Final

_ODD: Final = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**70), 1e308, 0.5, "", "x", "__type__"),
    *("../../etc/passwd", "/etc/passwd", "F32", "tensor", [], {}, [[]], [0, -1], "\x00", "9" * 400),
    *({"__type__": "tensor"}, {"__type__": "dict", "items": 3}, {"__type__": "os.system"}),
    *({"__type__": "bytes", "base64": "!"}, {"__type__": "int", "hex": "f" * 9000}),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of nested values with each of its keys."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from places(value[key])
    elif isinstance(value, list):
        for idx in range(len(value)):
            yield value, idx
            yield from places(value[idx])


def mutated(value: Any, generator: random.Random) -> Any:
    """Return nested values with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(generator.randrange(1, 4)):
        found = list(places(value))
        if not found:
            return generator.choice(_ODD)
        container, key = generator.choice(found)
        kind = generator.randrange(5)
        if kind == 0 and isinstance(container, dict):
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[f"{key}{generator.randrange(9)}"] = container.pop(key)
        elif kind == 2:
            other, place = generator.choice(found)
            container[key] = copy.deepcopy(other[place])
        elif kind == 3 and isinstance(container[key], int):
            container[key] += generator.choice([-1, 1, 8, 2**32, -(2**33)])
        else:
            container[key] = copy.deepcopy(generator.choice(_ODD))
    return value


def torn(data: bytes, generator: random.Random) -> bytes:
    """Return bytes with one to eight changes: other bytes, parts left out or twice."""
    changed = bytearray(data)
    for _ in range(generator.randrange(1, 9)):
        position = generator.randrange(len(changed) + 1)
        kind = generator.randrange(4)
        if kind == 0:
            changed[position : position + 1] = generator.randbytes(1)
        elif kind == 1:
            del changed[position : position + generator.randrange(1, 9)]
        elif kind == 2:
            changed[position:position] = changed[position : position + generator.randrange(1, 33)]
        else:
            changed[position : position + 4] = generator.choice(
                [b"[[[[", b'"\\u', b"{}}}", b"1e99"]
            )
    return bytes(changed)
