"""A tree of positioned values in the making."""

from __future__ import annotations

from collections.abc import Iterable

from modelzoo_trainer.config.positions import Entry, Mapping, Node, Place, Position, Sequence


class Draft:
    """A mapping to which values are added by path; what lies between is made when needed."""

    def __init__(self, key_at: Position, at: Position) -> None:
        self.key_at = key_at
        self.at = at
        self._entries: dict[str, Entry | Draft] = {}

    def put(self, path: str, entry: Entry, section: Place) -> None:
        """Add a value."""
        first, _, rest = path.partition("/")
        if not rest:
            self._entries[first] = entry
            return
        self.inside(first, section).put(rest, entry, section)

    def inside(self, key: str, section: Place) -> Draft:
        """Return the mapping at `key`, made if it is not there."""
        inner = self._entries.setdefault(key, Draft(section.key_at, section.node.at))
        assert isinstance(inner, Draft)  # no value is put above another one
        return inner

    def list_components(self, key: str, order: Iterable[str], more: Iterable[Node] = ()) -> None:
        """Make of the mapping at `key`, if there is one, a list of mappings with one key each."""
        inner = self._entries.get(key)
        if isinstance(inner, Draft):
            items = [Mapping({name: entry}, entry.key_at) for name, entry in inner._ordered(order)]
            self._entries[key] = Entry(inner.key_at, Sequence((*items, *more), inner.at))

    def mapping(self, order: Iterable[str] | None = None) -> Mapping:
        """Return what was added.

        `order`: of the keys; none = as they were added.
        """
        return Mapping(dict(self._ordered(order)), self.at)

    def _ordered(self, order: Iterable[str] | None) -> Iterable[tuple[str, Entry]]:
        for key in self._entries if order is None else order:
            value = self._entries.get(key)
            if isinstance(value, Draft):
                yield key, Entry(value.key_at, value.mapping())
            elif value is not None:
                yield key, value


def entry_of(place: Place) -> Entry:
    """Return the value at `place` with the place of its key."""
    return Entry(place.key_at, place.node)


def without(place: Place, keys: Iterable[str]) -> Mapping:
    """Return the mapping at `place` without some of its keys."""
    left_out = set(keys)
    kept = {key: entry_of(inner) for key, inner in place.pairs() if key not in left_out}
    return Mapping(kept, place.node.at)
