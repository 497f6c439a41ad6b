"""Check the sections of `trainer.init` and the dataloaders."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.constraints import Call, Progress, Seed
from modelzoo_trainer.config.arguments import check_value, schema_of
from modelzoo_trainer.config.components import (
    Component,
    add_lack,
    beside,
    check_call,
    check_component,
    check_list,
    check_plain,
    named,
)
from modelzoo_trainer.config.lengths import fill_lengths
from modelzoo_trainer.config.model_zoo_root import with_advice
from modelzoo_trainer.config.names import Names, NameTable, Unshipped
from modelzoo_trainer.config.positions import (
    DATA,
    FilePosition,
    Lack,
    Mapping,
    Place,
    Problems,
    Scalar,
    describe,
    is_null,
    option_in,
    to_plain,
)
from modelzoo_trainer.errors import ConfigError

INIT_KEYS: Final = (
    "device",
    "backend",
    "model_dir",
    "model",
    "call_model",
    "optimizer",
    "schedulers",
    "precision",
    "sparsity",
    "loop",
    "checkpoint",
    "logging",
    "callbacks",
    "loggers",
    "progress",
    "seed",
    "autorestart",
    "object_store",
)

OPTIONAL_TEXT: Final = str | None
OPTIONAL_TEXTS: Final = str | list[str] | None
OPTIONAL_PATH: Final = Path | None
_NAME_IT: Final = "add `name: <model>`, or write `package.Class: {...}`"
_OLDER_NAMES: Final = {"LlamaModel": "llama"}
SEED: Final = Seed | None
OPTIONAL_CALL: Final = Call | None
PROGRESS: Final = Progress | None


def check_model(place: Place, names: Names, problems: Problems) -> Component | None:
    """Return the model: `{name: gpt2, ...}` or `{mypkg.MyModel: {...}}`."""
    num_before = problems.num_added
    component = _model(place, names, problems)
    if component is not None and problems.num_added == num_before:
        _try_build(component, names.try_model, place, problems)
    return component


def _model(place: Place, names: Names, problems: Problems) -> Component | None:
    name, older = place.key("name"), place.key("model_name")
    if older is not None:
        if name is not None:
            what = "name and model_name are both given, but are the same setting. Keep name."
            problems.add(older.key_at, older.path, what)
        problems.note(older.key_at, older.path, "an older key for name; both work.")
        name = name or older
    if name is None:
        if _lacks_name(place):
            add_lack(place, "name", _NAME_IT, problems, Lack("setting", "name"))
            return None
        return check_component(place, names.models, problems)
    name = today_s(name, problems)
    target = _named_class(name, names.models, problems)
    if target is None:
        return None
    others = (
        () if isinstance(target, Unshipped) else _check_others(place, name, target, names, problems)
    )
    inside = getattr(target, "model_arguments", ())
    nested = dict.fromkeys(inside, partial(_inner_model, names=names))
    ignored = ("name", "model_name", *others)
    return check_call(target, place, problems, nested=nested, ignored=ignored)


def _lacks_name(place: Place) -> bool:
    """Return whether a model is written with its arguments, not as {package.Class: {...}}."""
    if not isinstance(place.node, Mapping) or len(place.node.entries) == 1:
        return False
    return not any("." in str(key) for key in place.node.entries)


def _inner_model(place: Place, problems: Problems, names: Names) -> dict[str, Any] | None:
    """Return the settings of a model that is an argument of another one, without inert ones."""
    if place.key("name") is None and place.key("model_name") is None:
        add_lack(place, "name", _NAME_IT, problems, Lack("setting", "name"))
        return None
    component = check_model(place, names, problems)
    if component is None:
        return None
    name = place.key("name") or place.key("model_name")
    assert name is not None
    return {"name": to_plain(today_s(name, Problems()).node), **component.arguments}


def today_s(name: Place, problems: Problems) -> Place:
    """Return the place of a model's name, with an older name replaced."""
    value = name.node.value if isinstance(name.node, Scalar) else None
    today = _OLDER_NAMES.get(value) if isinstance(value, str) else None
    if today is None:
        return name
    problems.note(name.node.at, name.path, f"{value} is an older name of {today}.")
    return replace(name, node=Scalar(today, name.node.at))


def _check_others(
    place: Place, name: Place, target: Any, names: Names, problems: Problems
) -> list[str]:
    """Return the keys of a shipped model that the format has and this package does not support.

    They are valid: those that are inert or switched off are ignored, the others cannot run here.
    """
    assert isinstance(name.node, Scalar)  # it has led to a class
    own = schema_of(target).parameters
    fields = {
        key: one
        for key, one in names.published_fields(str(name.node.value)).items()
        if key not in own
    }
    for key, inner in place.pairs():
        if key not in fields:
            continue
        value = check_value(inner, fields[key].parameter, problems)
        if fields[key].is_inert:
            problems.note(inner.key_at, inner.path, "no effect (nor in the Cerebras Model Zoo).")
        elif _is_on(value):
            what = (
                f"the Cerebras Model Zoo has this setting of {name.node.value}, but this package "
                f"does not support it. Remove it to run without it."
            )
            lack = Lack("setting", f"{key} of {name.node.value}")
            problems.add_to_run(inner.key_at, inner.path, what, lack)
    return list(fields)


def _is_on(value: Any) -> bool:
    """Return whether a setting is switched on: not 0, false, null, empty or made of such values."""
    return any(map(_is_on, value.values())) if isinstance(value, dict) else bool(value)


def check_dataloader(
    place: Place, names: Names, problems: Problems, model: Component | None = None
) -> Component | None:
    """Return the data processor that a dataloader names.

    `place`: `{data_processor: Name, ...arguments}`. `model`: has the lengths that are left out.
    """
    if not isinstance(place.node, Mapping):
        fits = "expected a mapping with data_processor and its arguments"
        problems.add(place.node.at, place.path, f"{fits}, got {describe(place.node)}.")
        return None
    name = place.key("data_processor")
    if name is None:
        why = "add `data_processor: <class>`, which reads the data"
        add_lack(place, "data_processor", why, problems)
        return None
    target = _named_class(name, names.processors, problems)
    if target is None:
        return None
    num_before = problems.num_added
    component = check_call(target, place, problems, ignored=("data_processor",))
    fill_lengths(component, place, model, names, problems)
    if problems.num_added == num_before and not isinstance(target, Unshipped):
        _try_processor(component, names, place, problems)
    return component


def _try_processor(component: Component, names: Names, place: Place, problems: Problems) -> None:
    """Add what a processor rejects, and what it needs that this machine lacks."""
    try:
        lacks = names.try_processor(component)
    except ConfigError as error:
        problems.add(_blamed(str(error), "", place), "", component.explain(error))
        return
    for what in map(with_advice, lacks):
        inner = _named_in(what, "", place)
        lack = Lack(DATA, what.partition(". ")[0])
        problems.add_to_run((inner or place).key_at, component.path, what, lack)


def _named_class(place: Place, table: NameTable, problems: Problems) -> Any | None:
    value = check_plain(place, str, problems)
    at_value = Place(place.node, place.path, place.node.at)
    return table.find(value, at_value, problems) if isinstance(value, str) else None


def check_section(key: str, place: Place, names: Names, problems: Problems) -> Component | None:
    """Return a section whose class is fixed, such as `loop`; None if it is null."""
    if is_null(place.node):
        return None
    num_before = problems.num_added
    component = check_call(names.sections[key], place, problems)
    if problems.num_added == num_before:
        _try_build(component, Component.make, place, problems)
    return component


def _try_build(
    component: Component, make: Callable[[Component], object], place: Place, problems: Problems
) -> None:
    """Add what a constructor rejects; `make` has no side effects, or builds nothing."""
    if isinstance(component.target, Unshipped):
        return
    try:
        made = make(component)
    except ValueError as error:  # a `ConfigError`, or one of torch's in a shipped class
        _, _, name = component.path.rpartition(".")
        problems.add(_blamed(str(error), name, place), "", component.explain(error))
        return
    for text in getattr(made, "notes", ()):
        problems.note(place.key_at, component.path, text)


def _blamed(message: str, owner: str, place: Place) -> FilePosition:
    """Return the position of the key that a message starts with, else an option's, else `place`."""
    inner = _named_in(message, owner, place)
    return inner.key_at if inner is not None else option_in(place.node) or place.key_at


def _named_in(message: str, owner: str, place: Place) -> Place | None:
    """Return the place that a message starts with, as in "owner.argument.key is 3"; or None."""
    rest = message.removeprefix(f"{owner}.")
    found = [
        (len(str(key)), key, inner)
        for key, inner in place.pairs()
        if rest.startswith(tuple(f"{key}{end}" for end in " :.["))
    ]
    if not found:
        return None
    length, _, inner = max(found, key=lambda one: one[0])
    rest = rest[length:]
    while (index := re.match(r"\[(\d+)\]", rest)) is not None:  # as in "argument[1].key is 3"
        items = list(inner.items())
        if int(index[1]) >= len(items):
            return inner
        inner, rest = items[int(index[1])], rest[index.end() :]
    deeper = _named_in(rest, "", inner) if rest.startswith(".") else None
    return deeper or inner


def check_optimizer(place: Place, names: Names, problems: Problems) -> Component | None:
    """Return the optimizer; None if it is null.

    `place`: `{ClassName: {arguments}}`.
    """
    if is_null(place.node):
        return None
    num_before = problems.num_added
    inner = dict(place.pairs())
    if len(inner) > 1 and all(isinstance(value.node, Mapping) for value in inner.values()):
        several = (
            " To train with several, pass Trainer(optimizer={name: ...}) and a custom "
            "training_step in Python."
        )
        what = (
            f"got {len(inner)} optimizers ({', '.join(map(repr, inner))}); a file can have only "
            f"one.{beside(place) or several}"
        )
        problems.add(option_in(place.node) or place.node.at, place.path, what)
        return None
    component = check_component(place, names.optimizers, problems, num_injected=1)
    if component is not None and problems.num_added == num_before:
        _try_build(component, names.try_optimizer, _only(place), problems)
    return component


def check_scheduler(place: Place, names: Names, problems: Problems) -> Component | None:
    """Return a scheduler; the schedulers among its arguments are components too.

    `place`: `{ClassName: {arguments}}`.
    """

    def one(inner: Place, problems: Problems) -> Component | None:
        return check_scheduler(inner, names, problems)

    def several(inner: Place, problems: Problems) -> list[Component | None]:
        return [one(item, problems) for item in check_list(inner, "scheduler", problems)]

    nested = {"scheduler": one, "schedulers": several}
    num_before = problems.num_added
    component = check_component(place, names.schedulers, problems, num_injected=1, nested=nested)
    if component is not None and problems.num_added == num_before:
        _try_build(component, names.try_scheduler, _only(place), problems)
    return component


def check_together(
    optimizer: Component | None,
    schedulers: list[Any],
    places: list[Place],
    names: Names,
    problems: Problems,
) -> None:
    """Check that schedulers are compatible with the optimizer and with each other."""
    for one, place in zip(schedulers, places, strict=True):
        try:
            names.try_together(optimizer, [one])
        except ConfigError as error:
            at = option_in(place.node) or place.key_at
            problems.add(at, place.path, str(error))
            return
    try:
        names.try_together(optimizer, schedulers)
    except ConfigError as error:
        options = filter(None, (option_in(place.node) for place in places))
        at = next(options, places[-1].key_at)
        problems.add(at, places[-1].path, str(error))


def _only(place: Place) -> Place:
    """Return the place of the arguments of a component, which has one key."""
    return next(inner for _, inner in place.pairs())


def check_installed(
    place: Place | None,
    table: NameTable,
    defaults: list[Any],
    problems: Problems,
    try_one: Callable[[Component], object],
) -> tuple[list[Component], list[Any]]:
    """Return the components of a list, and the defaults that it does not replace or remove.

    `place`: `callbacks` or `loggers`; an item `Name: null` removes a default.
    """
    components = []
    classes = set()
    kinds = {type(default) for default in defaults}
    for item in check_list(place, table.kind, problems):
        found = named(item, table, problems)
        if found is None:
            continue
        name, inner = found
        is_removed = is_null(inner.node)
        target = table.find(name, inner, problems, is_removed=is_removed)
        if target is None:
            continue
        classes.add(target)
        if not is_removed:
            num_before = problems.num_added
            component = check_call(target, inner, problems)
            if problems.num_added == num_before:
                _try_build(component, try_one, inner, problems)
            components.append(component)
        elif target not in kinds and not isinstance(target, Unshipped):
            problems.add(
                inner.key_at,
                inner.path,
                f"null removes a default {table.kind}, but {name} is not one of the defaults. "
                f"Write {{{name}: {{}}}} to add it.",
            )
    return components, [default for default in defaults if type(default) not in classes]
