"""A tree of positioned values in the making."""

from __future__ import annotations

from collections.abc import Iterable

from modelzoo_trainer.config.positions import Entry, Mapping, Node, Place, Position, Sequence


class Draft:
    """A mapping to which values are added by path; what lies between is made when needed.

    Args:
        key_at: Where its key stands.
        at: Where it begins.
    """

    def __init__(self, key_at: Position, at: Position) -> None:
        self.key_at = key_at
        self.at = at
        self._entries: dict[str, Entry | Draft] = {}

    def put(self, path: str, entry: Entry, section: Place) -> None:
        """Add a value.

        Args:
            path: Keys, separated by "/".
            entry: The value and the place of its key.
            section: Where in the file mappings come from that this value makes necessary.
        """
        first, _, rest = path.partition("/")
        if not rest:
            self._entries[first] = entry
            return
        self.inside(first, section).put(rest, entry, section)

    def inside(self, key: str, section: Place) -> Draft:
        """Return the mapping at `key`, made if it is not there.

        Args:
            key: A key.
            section: Where in the file the mapping comes from if it is made.
        """
        inner = self._entries.setdefault(key, Draft(section.key_at, section.node.at))
        assert isinstance(inner, Draft)  # no value is put above another one
        return inner

    def list_components(self, key: str, order: Iterable[str], more: Iterable[Node] = ()) -> None:
        """Make of the mapping at `key`, if there is one, a list of mappings with one key each.

        Args:
            key: A key.
            order: Of the keys of the mapping.
            more: Further items, which come last.
        """
        inner = self._entries.get(key)
        if isinstance(inner, Draft):
            items = [Mapping({name: entry}, entry.key_at) for name, entry in inner._ordered(order)]
            self._entries[key] = Entry(inner.key_at, Sequence((*items, *more), inner.at))

    def mapping(self, order: Iterable[str] | None = None) -> Mapping:
        """Return what was added.

        Args:
            order: Of the keys; none = as they were added.
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
    """Return the value at `place` with the place of its key.

    Args:
        place: Where it stands in the file.
    """
    return Entry(place.key_at, place.node)


def without(place: Place, keys: Iterable[str]) -> Mapping:
    """Return the mapping at `place` without some of its keys.

    Args:
        place: A mapping.
        keys: Those to leave out.
    """
    left_out = set(keys)
    kept = {key: entry_of(inner) for key, inner in place.pairs() if key not in left_out}
    return Mapping(kept, place.node.at)
