"""Convert the `optimizer` section of the older layout to an optimizer and its schedulers."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from types import MappingProxyType
from typing import Any, Final

from modelzoo_trainer.config.legacy.keys import OPTIMIZER, OPTIMIZER_OTHERS
from modelzoo_trainer.config.positions import (
    Entry,
    FilePosition,
    Mapping,
    Node,
    Place,
    Problems,
    Scalar,
    Sequence,
    describe,
    is_null,
)
from modelzoo_trainer.errors import suggest

_RENAMED: Final = {"weight_decay_rate": "weight_decay", "use_nesterov": "nesterov"}
# Arguments that were two numbers: their old names and defaults.
_PAIRS: Final[MappingOf[str, tuple[tuple[str, float], tuple[str, float]]]] = MappingProxyType(
    {
        "betas": (("beta1", 0.9), ("beta2", 0.999)),
        "eps": (("eps1", 1e-30), ("eps2", 1e-3)),
        "etas": (("eta1", 0.5), ("eta2", 1.2)),
        "step_sizes": (("step_size_min", 1e-6), ("step_size_max", 50.0)),
    }
)
_OTHER_PAIRS: Final[MappingOf[str, MappingOf[str, Any]]] = MappingProxyType(
    {
        "adafactor": {"betas": ()},  # its beta1 is an argument
        "lion": {"betas": (("beta1", 0.9), ("beta2", 0.99))},
    }
)

_SCHEDULERS: Final = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CosineDecayLR",
    "CyclicLR",
    "ExponentialLR",
    "InverseExponentialTimeDecayLR",
    "InverseSquareRootDecayLR",
    "LambdaLR",
    "LinearLR",
    "MultiplicativeLR",
    "MultiStepLR",
    "OneCycleLR",
    "PiecewiseConstantLR",
    "PolynomialLR",
    "StepLR",
)
_SCHEDULER_RENAMED: Final = {
    "steps": "total_iters",
    "decay_steps": "total_iters",
    "values": "learning_rates",
    "boundaries": "milestones",
    "t_max": "T_max",
    "t_0": "T_0",
    "t_mult": "T_mult",
}
# Those that called their first value learning_rate.
_BEGIN_AT_LEARNING_RATE: Final = ("CosineAnnealingLR", "LambdaLR", "MultiStepLR", "StepLR")
_MAIN: Final = {
    "sequential": "SequentialLR",
    "sequentiallr": "SequentialLR",
    "chained": "ChainedScheduler",
    "chainedlr": "ChainedScheduler",
    "chainedscheduler": "ChainedScheduler",
}


def convert_optimizer(section: Place, problems: Problems) -> Node | None:
    """Return `{Type: {arguments}}`, or None with a problem added."""
    kind = section.key("optimizer_type")
    if kind is None or is_null(kind.node):
        path = section.path_of("optimizer_type")
        problems.add(section.key_at, path, "missing; it selects the optimizer.")
        return None
    name = _text(kind, "the name of an optimizer", problems)
    if name is None:
        return None
    pairs = {**_PAIRS, **_OTHER_PAIRS.get(name.lower(), {})}
    entries = _pairs(section, pairs, problems)
    old_names = {old for pair in pairs.values() for old, _ in pair}
    done = {*OPTIMIZER, *OPTIMIZER_OTHERS, *old_names}
    given = {key: inner for key, inner in section.pairs() if key not in done}
    entries |= _renamed(given, _RENAMED, problems)
    return _component(name, kind.node.at, entries, section)


def convert_schedulers(section: Place, problems: Problems) -> Entry | None:
    """Return the list of schedulers that `learning_rate` describes; None if there is none."""
    place = section.key("learning_rate")
    if place is None or is_null(place.node):
        return None
    found: Node | None
    if isinstance(place.node, Scalar):
        found = _component("ConstantLR", place.key_at, {"learning_rate": place.entry}, place)
    else:
        found = _several(place, problems)
    if found is None:
        return None
    adjusted = section.key("adjust_learning_rate")
    if adjusted is not None and not _is_empty(adjusted.node):
        inner = {"scheduler": Entry(adjusted.key_at, found)}
        found = _component("ScalePerParamLR", adjusted.key_at, inner, place)
    return Entry(place.key_at, Sequence((found,), place.node.at))


def _several(place: Place, problems: Problems) -> Node | None:
    """Return the scheduler of a mapping, or one that holds all schedulers of a list."""
    items = list(place.items()) if isinstance(place.node, Sequence) else [place]
    if not items:
        problems.add(place.node.at, place.path, "the list is empty; expected schedulers.")
        return None
    members = [_scheduler(item, problems) for item in items]
    main = _main_scheduler(items, problems)
    if main is None or None in members:
        return None
    found = tuple(member for member in members if member is not None)
    if len(found) == 1 and main == "SequentialLR":
        return found[0]
    inner = {"schedulers": Entry(place.key_at, Sequence(found, place.node.at))}
    return _component(main, place.key_at, inner, place)


def _main_scheduler(items: list[Place], problems: Problems) -> str | None:
    """Return the class that all items name, or None with a problem added."""
    main: str | None = None
    for item in items:
        place = item.key("main_scheduler")
        if place is None or is_null(place.node):
            continue
        text = _text(place, "sequential or chained", problems)
        name = None if text is None else _MAIN.get(text.lower())
        if name is None:
            if text is not None:
                what = f"{text!r} is not valid. {suggest(text, _MAIN)}"
                problems.add(place.node.at, place.path, what)
            return None
        if main not in (None, name):
            what = (
                f"{text!r} differs from an earlier item, which selects {main}. Use the same "
                f"main_scheduler in all items."
            )
            problems.add(place.node.at, place.path, what)
            return None
        main = name
    return main or "SequentialLR"


def _scheduler(place: Place, problems: Problems) -> Node | None:
    """Return `{Class: {arguments}}` of `{scheduler: name, ...arguments}`."""
    if not isinstance(place.node, Mapping):
        fits = "expected a mapping with scheduler and its arguments"
        problems.add(place.node.at, place.path, f"{fits}, got {describe(place.node)}.")
        return None
    kind = place.key("scheduler")
    if kind is None:
        problems.add(place.key_at, place.path_of("scheduler"), "missing; it selects the scheduler.")
        return None
    text = _text(kind, "the name of a scheduler", problems)
    name = None if text is None else _scheduler_class(text)
    if name is None:
        if text is not None:
            what = f"{text!r} is not a scheduler. {suggest(text, _scheduler_names())}"
            problems.add(kind.node.at, kind.path, what)
        return None
    names = dict(_SCHEDULER_RENAMED)
    if name in _BEGIN_AT_LEARNING_RATE:
        names["learning_rate"] = "initial_learning_rate"
    done = ("scheduler", "main_scheduler")
    given = {key: inner for key, inner in place.pairs() if key not in done}
    return _component(name, kind.node.at, _renamed(given, names, problems), place)


def _scheduler_names() -> list[str]:
    """Return the names without "LR", as the older layout prefers them."""
    return [name.removesuffix("LR") for name in _SCHEDULERS]


def _scheduler_class(name: str) -> str | None:
    """Return the class; a dotted path is one already."""
    if "." in name:
        return name
    bare = name.lower().removesuffix("lr")
    return next((cls for cls in _SCHEDULERS if cls.lower().removesuffix("lr") == bare), None)


def _pairs(section: Place, pairs: MappingOf[str, Any], problems: Problems) -> dict[Any, Entry]:
    """Return the arguments that were two numbers; missing ones have their old default."""
    entries: dict[Any, Entry] = {}
    for argument, pair in pairs.items():
        places = [section.key(old) for old, _ in pair]
        given = [place for place in places if place is not None]
        if not given:
            continue
        whole = section.key(argument)
        if whole is not None:
            _given_twice(given[0], whole, problems)
            continue
        numbers = [
            Scalar(default, section.node.at) if place is None else place.node
            for place, (_, default) in zip(places, pair, strict=True)
        ]
        entries[argument] = Entry(given[0].key_at, Sequence(tuple(numbers), given[0].node.at))
    return entries


def _renamed(
    given: MappingOf[Any, Place], names: MappingOf[str, str], problems: Problems
) -> dict[Any, Entry]:
    """Return `given` under the current names."""
    first: dict[Any, Place] = {}
    for key, place in given.items():
        name = names.get(key, key)
        if name in first:
            _given_twice(place, first[name], problems)
        else:
            first[name] = place
    return {name: place.entry for name, place in first.items()}


def _given_twice(place: Place, other: Place, problems: Problems) -> None:
    what = f"the same setting as {other.path} (line {other.key_at.line}). Remove one of them."
    problems.add(place.key_at, place.path, what)


def _text(place: Place, fits: str, problems: Problems) -> str | None:
    if isinstance(place.node, Scalar) and isinstance(place.node.value, str):
        return place.node.value
    given = describe(place.node)
    problems.add(place.node.at, place.path, f"expected {fits}, got {given}.")
    return None


def _component(
    name: str, name_at: FilePosition, entries: dict[Any, Entry], place: Place
) -> Mapping:
    arguments = Mapping(entries, place.node.at)
    return Mapping({name: Entry(name_at, arguments)}, place.node.at)


def _is_empty(node: Node) -> bool:
    return is_null(node) or (isinstance(node, Mapping) and not node.entries)
