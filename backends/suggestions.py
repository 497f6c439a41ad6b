"""What to say of a word that is none of those known."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(given: str, known: Iterable[str]) -> str:
    """Return "Did you mean ...?", or if nothing is near, the choices."""
    choices = sorted(set(known))
    near = get_close_matches(given, choices, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Use one of: {', '.join(choices)}."
