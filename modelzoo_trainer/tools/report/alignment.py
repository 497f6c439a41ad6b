"""Settings of exchanged optimizers, schedules and callbacks, under paths that can be compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_ROOTS: Final = ("optimizer", "optimizers", "schedulers", "callbacks", "loggers")
_PREFIXES: Final = ("trainer.init.", "")  # of a run from YAML, of one from Python
_OWNERS: Final = ("optimizer", "scheduler", "schedulers")  # keys that are followed by a class
_UNSORTED: Final = ("callbacks", "loggers")  # the classes are told by their settings
_INDEX: Final = re.compile(r"\[\d+\]$")
_NONE: Final = ("[]", "{}", "null")


@dataclass(frozen=True, slots=True)
class _Place:
    """A setting of a component: where it is, and what it is called there."""

    root: str
    """Such as `trainer.init.schedulers`."""
    chain: tuple[tuple[str, str], ...]
    """Path and class of the component, after those that contain it."""
    rest: str
    """The setting's name in the component; "" = the component itself."""


@dataclass(slots=True)
class Aligned:
    """Settings of several runs, the same ones under the same path."""

    found: list[dict[str, str]]
    classes: list[str] = field(default_factory=list)
    """Added paths: the classes of optimizers and schedules that differ."""
    paths: dict[str, list[str]] = field(default_factory=dict)
    """The original paths of changed ones."""


def align(found: Sequence[Mapping[str, str]]) -> Aligned:
    """Compare components by class, not by position, where their classes differ between runs.

    `optimizer.AdamW.lr` becomes `optimizer.lr`, and `schedulers[0].SequentialLR.schedulers[1].
    LinearLR.total_iters` becomes `schedulers.LinearLR.total_iters`.
    """
    aligned = Aligned([dict(one) for one in found])
    places = [{key: place for key in one if (place := _place_of(key)) is not None} for one in found]
    for root in dict.fromkeys(place.root for one in places for place in one.values()):
        own = [{k: place for k, place in one.items() if place.root == root} for one in places]
        labels = [_labels(one.values()) for one in own]
        trees = [
            _tree(one) or _given(settings, root)
            for one, settings in zip(labels, found, strict=True)
        ]
        if len({tree for tree in trees if tree is not None}) > 1:
            _move(aligned, own, labels)
            _add_classes(aligned, root, labels, trees)
    return aligned


def _place_of(key: str) -> _Place | None:
    """Return the component that a setting belongs to; None = it belongs to none."""
    prefix = next(one for one in _PREFIXES if key.startswith(one))
    parts = key.removeprefix(prefix).split(".")
    root = _INDEX.sub("", parts[0])
    if root not in _ROOTS:
        return None
    at = 0
    if root == "optimizers" and len(parts) > 1:  # by name
        root, at = f"{root}.{parts[1]}", 1
    chain = []
    while at + 1 < len(parts) and parts[at + 1][:1].isupper():
        chain.append((prefix + ".".join(parts[: at + 2]), parts[at + 1]))
        at += 2
        if at >= len(parts) or _INDEX.sub("", parts[at]) not in _OWNERS:
            break
    return _Place(prefix + root, tuple(chain), ".".join(parts[at:])) if chain else None


def _labels(places: Iterable[_Place]) -> dict[str, tuple[str, str, str]]:
    """Return class, label and container of each component of a run, by its path.

    The label of the second component of a class is such as `LinearLR[1]`.
    """
    found: dict[str, tuple[str, str, str]] = {}
    for place in places:
        container = ""
        for path, kind in place.chain:
            if path not in found:
                num = sum(other == kind for other, _, _ in found.values())
                found[path] = (kind, f"{kind}[{num}]" if num else kind, container)
            container = path
    return found


def _tree(labels: Mapping[str, tuple[str, str, str]], container: str = "") -> str:
    """Return classes with those that they contain, such as `SequentialLR(LinearLR, StepLR)`."""
    names = []
    for path, (kind, _, outer) in labels.items():
        if outer == container:
            inner = _tree(labels, path)
            names.append(f"{kind}({inner})" if inner else kind)
    return ", ".join(names)


def _given(settings: Mapping[str, str], root: str) -> str | None:
    """Return what a run without components has there; None = its settings are named otherwise."""
    value = settings.get(root)
    if value is not None:
        return "none" if value in _NONE else value
    if any(key.startswith((f"{root}.", f"{root}[")) for key in settings):
        return None
    is_yaml = any(key.startswith("trainer.") for key in settings)
    return "none" if settings and is_yaml == root.startswith("trainer.") else None


def _move(
    aligned: Aligned,
    places: Sequence[Mapping[str, _Place]],
    labels: Sequence[Mapping[str, tuple[str, str, str]]],
) -> None:
    """Rename the settings of the components of a root."""
    for settings, own, names in zip(aligned.found, places, labels, strict=True):
        for key, place in own.items():
            kind = _last(place.root)
            new = [place.root]
            if not kind.startswith("optimizer"):
                new.append(names[place.chain[-1][0]][1])
            value = settings.pop(key)
            if not place.rest and kind not in _UNSORTED:
                continue  # the row of the classes says it
            new += [place.rest] if place.rest else []
            settings[".".join(new)] = value
            before = aligned.paths.setdefault(".".join(new), [])
            if key not in before:
                before.append(key)


def _add_classes(
    aligned: Aligned,
    root: str,
    labels: Sequence[Mapping[str, tuple[str, str, str]]],
    trees: Sequence[str | None],
) -> None:
    """Add the classes as a setting; of callbacks only if nothing but their order differs."""
    known = {tuple(sorted(name for _, name, _ in one.values())) for one in labels}
    if _last(root) in _UNSORTED and len(known) > 1:
        return
    for settings, tree in zip(aligned.found, trees, strict=True):
        if tree is not None:
            settings[root] = tree
    aligned.classes.append(root)


def _last(root: str) -> str:
    return root.removeprefix(_PREFIXES[0]).partition(".")[0]
