"""Components, `{ClassName: {arguments}}`: found and checked; built when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from functools import partial
from typing import Any

from modelzoo_trainer.base.annotations import adapter_of
from modelzoo_trainer.base.secrets import hiding
from modelzoo_trainer.config.arguments import (
    Check,
    Parameter,
    check_arguments,
    check_value,
    schema_of,
)
from modelzoo_trainer.config.model_zoo_root import with_advice, with_root
from modelzoo_trainer.config.names import NameTable, Unshipped
from modelzoo_trainer.config.positions import (
    FilePosition,
    Lack,
    Mapping,
    Place,
    Problems,
    Scalar,
    Sequence,
    describe,
    is_null,
    option_in,
)
from modelzoo_trainer.errors import ConfigError, suggest


@dataclass(frozen=True, slots=True)
class Component:
    """A class with checked arguments, not yet built."""

    target: Any
    arguments: dict[str, Any]  # by name; components among them are built first
    at: FilePosition  # where the file names it, or the option that set an argument
    path: str

    def build(self, *injected: Any) -> Any:
        """Return the object.

        `*injected`: arguments that are not set by the file; members get None for each.

        Raises:
            ConfigError: If the class rejects its arguments, or needs more memory than there is;
                with the place in the file. Any other exception is raised unchanged, with the place
                as a note.
        """
        return self.placed(partial(self.make, *injected))

    def placed(self, function: Callable[[], Any], method: str = "") -> Any:
        """Call a function of the component; errors are as in `build`.

        `method`: a method of the built object that it is, for messages.
        """
        try:
            return function()
        except ConfigError as error:
            raise ConfigError(f"{self.at}: {self.explain(error)}") from error
        except Exception as error:
            from modelzoo_trainer.base.devices import is_too_large  # imports torch

            if is_too_large(error):
                what = str(error).partition("\n")[0] or type(error).__name__
                raise ConfigError(
                    f"{self.at}: {self.path}: its sizes are too large for this machine ({what}). "
                    f"Lower them."
                ) from error
            error.add_note(f"raised by {self.path} ({self.at}){self._whose(method)}")
            raise

    def _whose(self, method: str) -> str:
        """Return the class, where the path does not name it, and what to do."""
        name = ".".join(str(getattr(self.target, n, "")) for n in ("__module__", "__qualname__"))
        if self.path.endswith(name):
            return ""
        where = f"{name}.{method}" if method else name
        return f", in {where}: correct this class, or its arguments in the file"

    def make(self, *injected: Any) -> Any:
        """Return the object; errors do not name the place in the file."""
        absent = (None,) * len(injected)
        arguments = {name: _built(value, absent) for name, value in self.arguments.items()}
        return self.target(*injected, **arguments)

    def explain(self, error: ValueError) -> str:
        """Return the message of `error` with the path in front, without repeating a name.

        Secrets among the arguments are hidden.
        """
        parent, _, name = self.path.rpartition(".")
        text = with_advice(hiding(self.arguments)(str(error)))
        if text.startswith((f"{name}:", f"{name}.", f"{name} ")):
            return f"{parent}.{text}"
        return f"{self.path}: {text}"


def _built(value: Any, injected: tuple[None, ...]) -> Any:
    if isinstance(value, Component):
        return value.make(*injected)
    if isinstance(value, list):
        return [_built(item, injected) for item in value]
    return value


def check_component(
    place: Place,
    table: NameTable,
    problems: Problems,
    *,
    num_injected: int = 0,
    nested: MappingOf[str, Check] | None = None,
) -> Component | None:
    """Return the component that `place` describes, or None with problems added.

    `place`: a mapping with one key, the class; its value holds the arguments, or is null.
    """
    found = named(place, table, problems)
    if found is None:
        return None
    name, inner = found
    target = table.find(name, inner, problems)
    if target is None:
        return None
    return check_call(target, inner, problems, num_injected=num_injected, nested=nested)


def check_call(
    target: Any,
    place: Place,
    problems: Problems,
    *,
    num_injected: int = 0,
    nested: MappingOf[str, Check] | None = None,
    ignored: Collection[str] = (),
) -> Component:
    """Return `target` with the arguments at `place`, checked."""
    is_shipped = not isinstance(target, Unshipped)
    schema = schema_of(target, num_injected) if is_shipped else target.schema
    arguments = check_arguments(place, schema, problems, nested=nested, ignored=ignored)
    arguments = {name: with_root(value) for name, value in arguments.items()}
    return Component(target, arguments, option_in(place.node) or place.key_at, place.path)


def named(place: Place, table: NameTable, problems: Problems) -> tuple[Any, Place] | None:
    """Return the only key of a mapping, a class name, and the place of its value.

    `place`: should be `{ClassName: {arguments}}`. `table`: the classes it may name.
    """
    form = f"{table.one} is written as {{ClassName: {{arguments}}}}"
    node = place.node
    if isinstance(node, Scalar) and isinstance(node.value, str):
        problems.add(node.at, place.path, _bare_name(node.value, form, table))
        return None
    if not isinstance(node, Mapping):
        problems.add(node.at, place.path, f"{form}, got {describe(node)}.")
        return None
    if len(node.entries) != 1:
        keys = ", ".join(repr(key) for key in node.entries) or "no key"
        hint = " Indent the arguments below the name." if is_null_first(node) else ""
        hint = beside(place) or hint
        at = option_in(node) or node.at
        problems.add(at, place.path, f"{form}, with exactly one key; got {keys}.{hint}")
        return None
    return next(place.pairs())


def beside(place: Place) -> str:
    """Return what to write in place of an option that set a key beside the class of a file.

    "" if no option did so. The text begins with a space.
    """
    entries = place.node.entries if isinstance(place.node, Mapping) else {}
    named = [key for key, entry in entries.items() if not entry.key_at.is_option]
    if len(named) != 1 or len(entries) == 1:
        return ""
    return (
        f" The file has {named[0]!r} there. To change an argument of it, use "
        f"--set {place.path_of(named[0])}.ARGUMENT=VALUE; to replace it, "
        f"--set '{place.path}={{ClassName: {{...}}}}'."
    )


def _bare_name(name: str, form: str, table: NameTable) -> str:
    """Return what to write in place of a name without its arguments."""
    try:
        table.resolve(name)
    except ConfigError as error:
        return f"{error} {form[0].upper()}{form[1:]}."
    return f"{form}; write {{{name}: {{}}}}."


def is_null_first(node: Mapping) -> bool:
    """Return whether the first key has no value, because its arguments are not indented."""
    first = next(iter(node.entries.values()), None)
    return first is not None and is_null(first.node)


def check_plain(place: Place, annotation: Any, problems: Problems) -> Any:
    """Check and return a value that is not a component."""
    parameter = Parameter(place.path, annotation, False, adapter_of(annotation))
    return check_value(place, parameter, problems)


def check_list(place: Place | None, kind: str, problems: Problems) -> list[Place]:
    """Return the places of a list's items; none if it is missing or null."""
    if place is None or is_null(place.node):
        return []
    if not isinstance(place.node, Sequence):
        given = describe(place.node)
        problems.add(place.node.at, place.path, f"expected a list of {kind}s, got {given}.")
    return list(place.items())


def check_keys(
    place: Place, known: Collection[str], required: Collection[str], problems: Problems
) -> bool:
    """Return whether `place` is a mapping; unknown and missing keys are added as problems."""
    what = place.path or "the file"
    if not isinstance(place.node, Mapping):
        given = describe(place.node)
        fits = f"expected a mapping with {', '.join(known)}"
        problems.add(place.node.at, place.path, f"{fits}, got {given}.")
        return False
    for key, value in place.pairs():
        if key not in known:
            text = f"no such key in {what}. {problems.suggest(str(key), known)}"
            problems.add(value.key_at, value.path, text.rstrip())
    for key in required:
        inner = place.key(key)
        if inner is None or is_null(inner.node):
            at = place.key_at if inner is None else inner.key_at
            problems.add(at, place.path_of(key), f"missing; {what} requires it.")
    return True


def add_lack(
    place: Place,
    key: str,
    why: str,
    problems: Problems,
    lack: Lack | None = None,
) -> None:
    """Add a problem for a missing or misspelt key.

    `lack`: what the file then needs to run, if it is valid without the key.
    """
    for other, inner in place.pairs():
        advice = suggest(str(other), (key,), cutoff=0.75)
        if advice.startswith("Did"):
            problems.add(inner.key_at, inner.path, f"no such key. {advice}")
            return
    what = place.key_at, place.path_of(key), f"missing; {why}."
    if lack is None:
        problems.add(*what)
    else:
        problems.add_to_run(*what, lack)
