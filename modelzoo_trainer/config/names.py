"""Find the class that a name in a file stands for: shipped ones by name, others by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType, ModuleType
from typing import Any, Final, Self

from modelzoo_trainer.base.foreign_names import CALLBACKS, advice_for
from modelzoo_trainer.base.user_modules import import_path
from modelzoo_trainer.config.arguments import Schema
from modelzoo_trainer.config.positions import Lack, Place, Problems
from modelzoo_trainer.config.positions import Mapping as MappingNode
from modelzoo_trainer.errors import ConfigError, suggest

Advise = Callable[[str, Iterable[str]], str]


def _as_it_is(target: Any) -> Any:
    return target


def _known(names: Iterable[str]) -> str:
    """Return a sentence with the names, sorted; of very many only the first."""
    found = sorted(set(names))
    more = f" and {len(found) - _MOST_KNOWN} more" if len(found) > _MOST_KNOWN else ""
    return f"Known: {', '.join(found[:_MOST_KNOWN])}{more}."


def _none(*given: object) -> None:
    return None


def _nothing(*given: object) -> tuple[()]:
    return ()


_MOST_KNOWN: Final = 100  # names in a message, more than this package has of any kind
_HOW_TO_QUOTE: Final = (
    """ A class that the file does not name is quoted if it has dots: --set 'a."pkg.Class".b=1'."""
)
_HOW_TO_WRITE: Final = {
    "model": "model: {mypkg.MyModel: {...}}",
    "data processor": "data_processor: mypkg.MyProcessor",
}


@dataclass(frozen=True, slots=True, eq=False)
class Unshipped:
    """A published class that is not part of this package: its arguments are checked, no more."""

    kind: str  # "model", "data processor", "callback" or "logger"
    name: str  # as the format knows it
    schema: Schema
    shipped: tuple[str, ...]  # what this package has of the kind

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise that the class cannot be built.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(self.advice)

    @property
    def advice(self) -> str:
        """The available classes, and how to use a custom one."""
        write = _HOW_TO_WRITE.get(self.kind, "{mypkg.MyClass: {...}}")
        return (
            f"the {self.kind} {self.name!r} is not part of this package. Available: "
            f"{', '.join(self.shipped)}. For a custom class, write its dotted path, {write}, "
            f"or import its module with --import."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """The classes of one kind that a file may name."""

    kind: str  # what messages call one of them: "callback"
    names: tuple[str, ...] = ()
    load: Callable[[str], Any]  # returns the class of one of `names`
    # modules of `--import`, whose public classes may be named without a path
    modules: tuple[ModuleType, ...] = ()
    # adapts a class of the user to what is called in its place
    adapt: Callable[[Any], Any] = _as_it_is
    # returns the arguments of a published class that is not shipped; None = no such class
    published: Callable[[str, str], Schema | None] = _none
    published_names: Callable[[str], tuple[str, ...]] = _nothing  # the names of those

    @classmethod
    def of(cls, kind: str, classes: Mapping[str, Any]) -> Self:
        """Return a table of the given classes."""
        return cls(kind=kind, names=tuple(classes), load=classes.__getitem__)

    @property
    def one(self) -> str:
        """The kind with its article: "an optimizer"."""
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def find(
        self, name: object, place: Place, problems: Problems, *, is_removed: bool = False
    ) -> Any | None:
        """Return the class that `name` means, or None with a problem added."""
        if not isinstance(name, str):
            problems.add(place.key_at, place.path, f"{name!r} is not the name of {self.one}.")
            return None
        try:
            found = self.resolve(name, problems.suggest)
            if isinstance(found, Unshipped) and not is_removed:
                lack = Lack(found.kind, found.name)
                problems.add_to_run(place.key_at, place.path, found.advice, lack)
            return found
        except ConfigError as error:
            inside = isinstance(place.node, MappingNode)
            hint = _HOW_TO_QUOTE if inside and place.key_at.is_option else ""
            problems.add(place.key_at, place.path, f"{error}{hint}")
            return None

    def resolve(self, name: str, advise: Advise = suggest) -> Any:
        """Return the class that `name` means, shipped or not.

        `advise`: returns what to write instead of an unknown name, given the known ones.

        Raises:
            ConfigError: If there is none; with the nearest name.
        """
        return self.adapt(import_path(name)) if "." in name else self._bare(name, advise)

    def _bare(self, name: str, advise: Advise) -> Any:
        """Return a class that is shipped or in a module of `--import`."""
        lowered = name.lower()
        found: dict[str, Any] = {}
        shipped = next((known for known in self.names if known.lower() == lowered), None)
        if shipped is not None:
            found["modelzoo_trainer"] = self.load(shipped)
        for module in self.modules:
            own = dict(_classes_of(module))
            same = [known for known in own if known.lower() == lowered]
            if same:
                found[module.__name__] = own[name if name in own else same[0]]
        different = {id(value): value for value in found.values()}
        if len(different) > 1:
            raise ConfigError(
                f"{name!r} is in {' and in '.join(found)}. Write the dotted path of one of them."
            )
        if not found:
            return self._published(name, advise)
        (target,) = different.values()
        return target if "modelzoo_trainer" in found else self.adapt(target)

    def _published(self, name: str, advise: Advise) -> Unshipped:
        schema = self.published(self.kind, name)
        if schema is not None:
            return Unshipped(self.kind, name, schema, self.names)
        own = [*self.names, *self._imported_names()]
        foreign = advice_for(CALLBACKS, name) if self.kind == "callback" else ""
        advice = foreign or advise(name, own)
        if not foreign and not advice.startswith("Did"):
            wider = advise(name, (*own, *self.published_names(self.kind)))
            advice = wider if wider.startswith("Did") else advice
        if not foreign and advice.startswith("Did"):
            advice = f"{advice} {_known(own)}"
        raise ConfigError(f"{name!r} is not {self.one}. {advice}".rstrip())

    def _imported_names(self) -> Iterable[str]:
        for module in self.modules:
            yield from (name for name, _ in _classes_of(module))


def _classes_of(module: ModuleType) -> Iterable[tuple[str, type]]:
    """Yield the classes that a module, or a package, defines; not those that it imports."""
    for name, value in vars(module).items():
        if isinstance(value, type) and f"{value.__module__}.".startswith(f"{module.__name__}."):
            yield name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The classes that a file may name, and classes of sections with a fixed class."""

    trainer: Callable[..., Any]
    models: NameTable  # of `init.model`
    optimizers: NameTable  # of `init.optimizer`
    schedulers: NameTable  # of `init.schedulers`
    callbacks: NameTable  # of `init.callbacks`
    loggers: NameTable  # of `init.loggers`
    processors: NameTable  # of `data_processor` in a dataloader
    # the classes of the sections `precision`, `loop`, `checkpoint` and `logging`
    sections: Mapping[str, Any]
    # raises a `ConfigError` if the device (None = default) or an option of it is unknown; messages
    # start with "device" or "backend". Returns a message if the device is missing here, else None
    try_backend: Callable[[str | None, Mapping[str, Any]], str | None]
    # checks the arguments of a model as far as that is cheap; the result may have `notes` on
    # settings without effect
    try_model: Callable[[Any], object] = _none
    # returns an attribute that a model will have, such as max_position_embeddings; None = it has
    # none, ... = known when it is built
    model_limit: Callable[[Any, str], int | EllipsisType | None] = lambda model, name: ...
    try_optimizer: Callable[[Any], object] = _none  # likewise an optimizer
    try_scheduler: Callable[[Any], object] = _none  # likewise a scheduler
    # raises a `ConfigError` if an optimizer (or None) and schedulers do not fit together
    try_together: Callable[[Any, list[Any]], object] = _none
    # likewise a callback or logger; the result may have `notes` on settings without effect
    try_callback: Callable[[Any], object] = _none
    # checks the arguments of a data processor; returns messages on what this machine lacks for it
    try_processor: Callable[[Any], Iterable[str]] = _nothing
    # returns messages on a checkpoint's path that cannot be used
    try_checkpoint: Callable[[str], Iterable[str]] = _nothing
    # returns the fields of a shipped model in the format (`published.Field`), supported or not
    published_fields: Callable[[str], Mapping[str, Any]] = lambda name: {}
    # makes the default callbacks
    default_callbacks: Callable[[], Iterable[Any]] = field(default=tuple)
    # makes the default loggers
    default_loggers: Callable[[], Iterable[Any]] = field(default=tuple)
