"""The sections of `trainer.init`, and the dataloaders: each checked by a function of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.config.arguments import Parameter, adapter_of, check_value
from modelzoo_trainer.config.components import (
    Component,
    check_call,
    check_component,
    check_list,
    named,
)
from modelzoo_trainer.config.names import Names, NameTable
from modelzoo_trainer.config.positions import Mapping, Place, describe, is_null, to_plain
from modelzoo_trainer.config.problems import Problems
from modelzoo_trainer.errors import ConfigError, suggest

OPTIONAL_TEXT: Final = str | None
OPTIONAL_PATH: Final = Path | None
OPTIONAL_INT: Final = int | None


def check_plain(place: Place, annotation: Any, problems: Problems) -> Any:
    """Return a value that is no component, checked.

    Args:
        place: The value.
        annotation: What fits.
        problems: What is wrong is added here.
    """
    parameter = Parameter(place.path, annotation, False, adapter_of(annotation))
    return check_value(place, parameter, problems)


def check_device(
    device: Place | None, backend: Place | None, names: Names, problems: Problems
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the device's name in lower case, and the backend's options.

    Args:
        device: `init.device`.
        backend: `init.backend`; its `backend_type` is the device as well.
        names: Knows the backends.
        problems: What is wrong is added here.
    """
    given = [place for place in (device,) if place is not None and not is_null(place.node)]
    options = None
    if backend is not None and not is_null(backend.node):
        if isinstance(backend.node, Mapping):
            options = to_plain(backend.node)
            kind = backend.key("backend_type")
            options.pop("backend_type", None)
            given += [kind] if kind is not None and not is_null(kind.node) else []
        else:
            what = f"{describe(backend.node)} does not fit; expected a mapping of options."
            problems.add(backend.node.at, backend.path, what)
    values = [check_plain(place, str, problems) for place in given]
    if not all(isinstance(value, str) for value in values):
        return None, options
    if len({value.lower() for value in values}) > 1:
        problems.add(
            given[0].node.at,
            given[0].path,
            f"{values[0]!r} and backend.backend_type {values[1]!r} are both given; they exclude "
            f"each other.",
        )
    elif values or options:
        _try_backend(given, backend, values[0] if values else None, options, names, problems)
    return (values[0].lower() if values else None), options


def _try_backend(
    given: list[Place],
    backend: Place | None,
    device: str | None,
    options: dict[str, Any] | None,
    names: Names,
    problems: Problems,
) -> None:
    """Add what the backend refuses: its name, an option, or a device that is not there."""
    try:
        names.try_backend(device, options or {})
    except ConfigError as error:
        place = backend if str(error).startswith("backend") or not given else given[0]
        assert place is not None  # there is a device or a backend
        init = place.path[: place.path.index(".init") + len(".init")]
        problems.add(place.node.at, "", f"{init}.{error}")


def check_model(place: Place, names: Names, problems: Problems) -> Component | None:
    """Return the model: `{name: gpt2, ...}` or `{mypkg.MyModel: {...}}`.

    Args:
        place: The section.
        names: Knows the models.
        problems: What is wrong is added here.
    """
    num_before = len(problems)
    component = _model(place, names, problems)
    if component is not None and len(problems) == num_before:
        _try_build(component, names.try_model, place, problems)
    return component


def _model(place: Place, names: Names, problems: Problems) -> Component | None:
    name = place.key("name")
    if name is None:
        if isinstance(place.node, Mapping) and len(place.node.entries) != 1:
            _lacks(place, "name", "it says which model", problems)
            return None
        return check_component(place, names.models, problems)
    target = _named_class(name, names.models, problems)
    if target is None:
        return None
    return check_call(target, place, problems, ignored=("name",))


def check_dataloader(place: Place, names: Names, problems: Problems) -> Component | None:
    """Return the data processor that a dataloader names.

    Args:
        place: `{data_processor: Name, ...arguments}`.
        names: Knows the data processors.
        problems: What is wrong is added here.
    """
    if not isinstance(place.node, Mapping):
        fits = "expected a mapping with data_processor and its arguments"
        problems.add(place.node.at, place.path, f"{describe(place.node)} does not fit; {fits}.")
        return None
    name = place.key("data_processor")
    if name is None:
        _lacks(place, "data_processor", "it says which class reads the data", problems)
        return None
    target = _named_class(name, names.processors, problems)
    if target is None:
        return None
    return check_call(target, place, problems, ignored=("data_processor",))


def _lacks(place: Place, key: str, why: str, problems: Problems) -> None:
    """Add that the key which names the class is missing, or is misspelt."""
    for other, inner in place.pairs():
        advice = suggest(str(other), (key,), cutoff=0.75)
        if advice.startswith("Did"):
            problems.add(inner.key_at, inner.path, f"no such key. {advice}")
            return
    problems.add(place.key_at, place.path_of(key), f"missing; {why}.")


def _named_class(place: Place, table: NameTable, problems: Problems) -> Any | None:
    value = check_plain(place, str, problems)
    at_value = Place(place.node, place.path, place.node.at)
    return table.find(value, at_value, problems) if isinstance(value, str) else None


def dataloader_factory(component: Component) -> Callable[[], Any]:
    """Return a callable that builds the data processor and returns its dataloader.

    Args:
        component: The data processor; one without `create_dataloader` is the dataloader itself.
    """

    def create() -> Any:
        processor = component.build()
        make = getattr(processor, "create_dataloader", None)
        return processor if make is None else make()

    return create


def check_section(key: str, place: Place, names: Names, problems: Problems) -> Component | None:
    """Return a section whose class is fixed, such as `loop`; None if it is null.

    Args:
        key: The section's name.
        place: Its arguments.
        names: Knows the class.
        problems: What is wrong is added here, also what the constructor refuses.
    """
    if is_null(place.node):
        return None
    num_before = len(problems)
    component = check_call(names.sections[key], place, problems)
    if len(problems) == num_before:
        _try_build(component, Component.make, place, problems)
    return component


def _try_build(
    component: Component, make: Callable[[Component], object], place: Place, problems: Problems
) -> None:
    """Add what a constructor refuses; `make` has no effects, or is no trial at all."""
    try:
        make(component)
    except ValueError as error:  # a `ConfigError`, or one of torch's in a shipped class
        _, _, name = component.path.rpartition(".")
        about = re.match(rf"{name}\.(\w+)", str(error))
        inner = place.key(about[1]) if about else None
        problems.add((inner or place).key_at, "", component.explain(error))


def check_optimizer(place: Place, names: Names, problems: Problems) -> Component | None:
    """Return the optimizer; None if it is null.

    Args:
        place: `{ClassName: {arguments}}`.
        names: Knows the optimizers.
        problems: What is wrong is added here.
    """
    if is_null(place.node):
        return None
    num_before = len(problems)
    component = check_component(place, names.optimizers, problems, num_injected=1)
    if component is not None and len(problems) == num_before:
        _try_build(component, names.try_optimizer, _only(place), problems)
    return component


def check_scheduler(place: Place, names: Names, problems: Problems) -> Component | None:
    """Return a scheduler; the members of one that is made of others are components as well.

    Args:
        place: `{ClassName: {arguments}}`.
        names: Knows the schedulers.
        problems: What is wrong is added here.
    """

    def one(inner: Place, problems: Problems) -> Component | None:
        return check_scheduler(inner, names, problems)

    def several(inner: Place, problems: Problems) -> list[Component | None]:
        return [one(item, problems) for item in check_list(inner, "scheduler", problems)]

    nested = {"scheduler": one, "schedulers": several}
    num_before = len(problems)
    component = check_component(place, names.schedulers, problems, num_injected=1, nested=nested)
    if component is not None and len(problems) == num_before:
        _try_build(component, names.try_scheduler, _only(place), problems)
    return component


def _only(place: Place) -> Place:
    """Return the place of the arguments of a component, which has one key."""
    return next(inner for _, inner in place.pairs())


def check_installed(
    place: Place | None, table: NameTable, defaults: list[Any], problems: Problems
) -> tuple[list[Component], list[Any]]:
    """Return the components of a list, and the defaults that it neither names nor removes.

    Args:
        place: `callbacks` or `loggers`; an item `Name: null` removes a default.
        table: Where the classes are looked up.
        defaults: Instances that are installed unless named.
        problems: What is wrong is added here.
    """
    components = []
    classes = set()
    kinds = {type(default) for default in defaults}
    for item in check_list(place, table.kind, problems):
        found = named(item, table.one, problems)
        target = table.find(*found, problems) if found is not None else None
        if found is None or target is None:
            continue
        name, inner = found
        classes.add(target)
        if not is_null(inner.node):
            components.append(check_call(target, inner, problems))
        elif target not in kinds:
            problems.add(
                inner.key_at,
                inner.path,
                f"null removes a default, and {name} is none. Write {{{name}: {{}}}} to add it.",
            )
    return components, [default for default in defaults if type(default) not in classes]
