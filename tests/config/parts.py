"""YAML text in parts that know where they begin and end, aliases as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from modelzoo_trainer.config import loader


@dataclass(eq=False)
class Part:
    """A key or a value.

    Args:
        kind: "scalar", "list", "mapping" or "alias".
        start: Index of its first character, its anchor included.
        end: Index behind its last character; of a block, that of the last value in it.
        line: From 1.
        value: Of a scalar, its text; of an alias, its name.
        is_plain: Whether a scalar stands without quotes.
        is_flow: Whether a list or mapping stands in brackets.
        anchor: Its name, if it has one.
        items: Of a list.
        pairs: Of a mapping.
    """

    kind: str
    start: int
    end: int
    line: int
    value: str = ""
    is_plain: bool = False
    is_flow: bool = False
    anchor: str | None = None
    items: list[Part] = field(default_factory=list)
    pairs: list[tuple[Part, Part]] = field(default_factory=list)

    def inside(self) -> Iterator[Part]:
        """Yield this part and all in it."""
        yield self
        for part in [*self.items, *(part for pair in self.pairs for part in pair)]:
            yield from part.inside()

    def plain(self) -> Any:
        """Return the value of a scalar."""
        kind = loader.kind_of(self.value) if self.is_plain else "str"
        return loader.value_of(kind, self.value)


def parts_of(text: str) -> tuple[Part, dict[str, Part]]:
    """Return a document, and its parts with an anchor by name.

    Args:
        text: A document that is right.
    """
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    anchored: dict[str, Part] = {}
    inner = (
        event for event in events if isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent)
    )
    return _part(next(inner), inner, anchored), anchored


def _part(event: Any, events: Iterator[Any], anchored: dict[str, Part]) -> Part:
    start, end = event.start_mark, event.end_mark
    if isinstance(event, yaml.AliasEvent):
        return Part("alias", start.index, end.index, start.line + 1, event.anchor)
    kind = {"ScalarEvent": "scalar", "SequenceStartEvent": "list"}.get(
        type(event).__name__, "mapping"
    )
    part = Part(kind, start.index, end.index, start.line + 1, anchor=event.anchor)
    if event.anchor:
        anchored[event.anchor] = part
    if isinstance(event, yaml.ScalarEvent):
        part.value, part.is_plain = event.value, event.implicit[0]
        return part
    part.is_flow = bool(event.flow_style)
    found = []
    while not isinstance(event := next(events), yaml.CollectionEndEvent):
        found.append(_part(event, events, anchored))
    part.end = event.end_mark.index if part.is_flow else max(inner.end for inner in found)
    if kind == "list":
        part.items = found
    else:
        part.pairs = list(zip(found[::2], found[1::2], strict=True))
    return part


def plain(
    part: Part,
    anchored: dict[str, Part],
    at: Part | None = None,
    change: dict[str, Any] | None = None,
) -> Any:
    """Return a value as Python's dictionaries, lists and scalars.

    Args:
        part: The value.
        anchored: As `parts_of` returned them.
        at: A key; None = nothing is changed.
        change: What to do there: another "key", another "value", or neither to leave it out.
    """
    if part.kind == "alias":
        return plain(anchored[part.value], anchored, at, change)
    if part.kind == "scalar":
        return part.plain()
    if part.kind == "list":
        return [plain(item, anchored, at, change) for item in part.items]
    found = {}
    for key, value in part.pairs:
        name, inner = key.value, None
        if key is at and change is not None:
            if not change:
                continue
            name = change.get("key", name)
            inner = change.get("value")
        found[name] = plain(value, anchored, at, change) if inner is None else inner
    return found
