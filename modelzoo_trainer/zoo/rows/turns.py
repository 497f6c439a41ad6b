"""What a read hook returns: the turns of a document, each with its regions of text.

The published form, a "semantic data array", is a list of
`{type: role, content: [{region: text}, ...]}`, where `semantic_loss_weight` and
`semantic_drop_mask` may have one value for each item of `content`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from modelzoo_trainer.errors import ConfigError, suggest

_KEYS: Final = (
    "type",
    "content",
    "semantic_loss_weight",
    "semantic_drop_mask",
    "semantic_attention_mask",
    "message",
)


class TurnRegion(NamedTuple):
    """A piece of a turn. None = the setting, or its default, decides."""

    name: str
    content: str | tuple[int, ...]  # text, or token ids
    loss_weight: float | None = None
    is_dropped: bool | None = None


class Turn(NamedTuple):
    """One message, or one part of a document; `role` is "" if there is only text."""

    role: str
    regions: tuple[TurnRegion, ...]
    message: Mapping[str, Any] | None = None
    """Other keys of a message, such as calls of tools, for the chat template."""


def turns_of(returned: Any, where: str) -> tuple[Turn, ...]:
    """Return the turns in what a hook has returned; none if the document is to be skipped.

    `where`: the hook, the file and the document, for messages.

    Raises:
        ConfigError: If it is not a semantic data array.
    """
    if returned is None:
        return ()
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Sequence):
        raise ConfigError(
            f"{where}: a list of turns is expected, got {_shown(returned)}. Return "
            "[{'type': role, 'content': [{'text': ...}]}], or None to skip the document."
        )
    return tuple(_turn(item, f"{where}: turn {index}") for index, item in enumerate(returned))


def _turn(item: Any, where: str) -> Turn:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: a dict is expected, got {_shown(item)}.")
    for key in item:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}. {suggest(str(key), _KEYS)}")
    role, content = item.get("type") or "", item.get("content")
    if not isinstance(role, str):
        raise ConfigError(f"{where}: 'type' must be a string, got {_shown(role)}.")
    if not isinstance(content, list | tuple):
        raise ConfigError(f"{where}: 'content' must be a list of dicts, got {_shown(content)}.")
    weights = _values(item, "semantic_loss_weight", len(content), where)
    drops = _values(item, "semantic_drop_mask", len(content), where)
    seen = _values(item, "semantic_attention_mask", len(content), where)
    if any(value not in (None, 1) for value in seen):
        raise ConfigError(
            f"{where}: 'semantic_attention_mask' has no effect on text: every token is attended "
            "to. Omit it, or drop the region with 'semantic_drop_mask'."
        )
    regions = [
        _region(piece, weight, drop, where)
        for piece, weight, drop in zip(content, weights, drops, strict=True)
    ]
    return Turn(role, tuple(regions), item.get("message"))


def _region(piece: Any, weight: Any, drop: Any, where: str) -> TurnRegion:
    if not isinstance(piece, Mapping) or len(piece) != 1:
        raise ConfigError(
            f"{where}: each item of 'content' is a dict with one region, such as "
            f"{{'text': ...}}; got {_shown(piece)}."
        )
    [(name, content)] = piece.items()
    if name == "image":
        raise ConfigError(f"{where}: images are not supported, only text.")
    return TurnRegion(
        str(name),
        _content(content, f"{where}, region {name!r}"),
        _weight(weight, where),
        None if drop is None else bool(drop),
    )


def _content(content: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        if all(type(token) is int and token >= 0 for token in content):
            return tuple(content)
    elif hasattr(content, "tolist"):  # an array of token ids, from a parquet file
        return _content(content.tolist(), where)
    raise ConfigError(
        f"{where}: a string or a list of token ids is expected, got {_shown(content)}."
    )


def _weight(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return float(value)
    raise ConfigError(f"{where}: a loss weight must be 0 or 1, got {_shown(value)}.")


def _values(item: Mapping[str, Any], key: str, size: int, where: str) -> Sequence[Any]:
    values = item.get(key)
    if values is None:
        return [None] * size
    if not isinstance(values, list | tuple) or len(values) != size:
        raise ConfigError(
            f"{where}: {key!r} must have one value for each of the {size} items of 'content', "
            f"got {_shown(values)}."
        )
    return values


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:60]}..."
