"""Weight initializers in configurations: a name, or a mapping with `name`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor
from torch.nn import init

from modelzoo_trainer.base.devices import truncated_normal_
from modelzoo_trainer.errors import ConfigError, suggest

InitializerSetting = str | dict[str, Any]
"""`truncated_normal`, or `{name: truncated_normal, std: 0.02, ...}`."""

_FUNCTIONS: Final[Mapping[str, tuple[Callable[..., object], Mapping[str, Any]]]] = MappingProxyType(
    {
        "constant": (init.constant_, {"val": 0.0}),
        "zeros": (init.zeros_, {}),
        "ones": (init.ones_, {}),
        "uniform": (init.uniform_, {"a": -0.05, "b": 0.05}),
        "normal": (init.normal_, {"mean": 0.0, "std": 0.05}),
        "truncated_normal": (
            truncated_normal_,
            {"mean": 0.0, "std": 0.05, "a": None, "b": None},
        ),
        "xavier_normal": (init.xavier_normal_, {"gain": 1.0}),
        "glorot_normal": (init.xavier_normal_, {"gain": 1.0}),
        "xavier_uniform": (init.xavier_uniform_, {"gain": 1.0}),
        "glorot_uniform": (init.xavier_uniform_, {"gain": 1.0}),
        "kaiming_normal": (
            init.kaiming_normal_,
            {"a": 0.0, "mode": "fan_in", "nonlinearity": "leaky_relu"},
        ),
        "kaiming_uniform": (
            init.kaiming_uniform_,
            {"a": 0.0, "mode": "fan_in", "nonlinearity": "leaky_relu"},
        ),
    }
)
_SCALABLE: Final = ("normal", "truncated_normal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """A function of `torch.nn.init` with its arguments."""

    name: str  # as in a configuration
    options: Mapping[str, Any]  # all arguments of the function, after the tensor

    def __call__(self, tensor: Tensor) -> None:
        """Fill the tensor in place."""
        _FUNCTIONS[self.name][0](tensor, **self.options)

    def scaled(self, factor: float) -> "Initializer":
        """Return this initializer with its spread, and bounds, multiplied by `factor`.

        Raises:
            ConfigError: If this initializer has no standard deviation.
        """
        if factor == 1:
            return self
        if self.name not in _SCALABLE:
            raise ConfigError(
                f"initializer {self.name!r} cannot be scaled, which muP requires; "
                f"use one of {', '.join(_SCALABLE)}."
            )
        scaled = {key: value * factor for key, value in self.options.items() if key != "mean"}
        return replace(self, options={**self.options, **scaled})


def truncated_normal(std: float) -> Initializer:
    """Return a normal distribution with mean 0, truncated at two standard deviations."""
    options = {"mean": 0.0, "std": std, "a": -2 * std, "b": 2 * std}
    return Initializer(name="truncated_normal", options=options)


def normal(std: float) -> Initializer:
    """Return a normal distribution with mean 0."""
    return Initializer(name="normal", options={"mean": 0.0, "std": std})


def read_initializer(argument: str, setting: InitializerSetting) -> Initializer:
    """Return the initializer of a setting.

    `setting`: a name, or a mapping with `name` and the arguments of that initializer.

    Raises:
        ConfigError: If the name or an argument is unknown.
    """
    given = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = _take_name(argument, given)
    defaults = _FUNCTIONS[name][1]
    for key, value in given.items():
        if key not in defaults:
            raise ConfigError(
                f"{argument}.{key}: no such argument of {name!r}. {suggest(str(key), defaults)}"
            )
        _check_kind(f"{argument}.{key}", value, is_text=isinstance(defaults[key], str))
    options = {**defaults, **{key: value for key, value in given.items() if value is not None}}
    if name == "truncated_normal":
        for key, bound in (("a", -2), ("b", 2)):
            if options[key] is None:
                options[key] = bound * options["std"]
    return Initializer(name=name, options=options)


def _take_name(argument: str, given: dict[str, Any]) -> str:
    if "name" not in given:
        misspelt = [key for key in given if suggest(str(key), ("name",)).startswith("Did")]
        if misspelt:
            raise ConfigError(f"{argument}.{misspelt[0]}: no such key. Did you mean 'name'?")
    called = given.pop("name", None)
    name = str(called).lower()
    if name not in _FUNCTIONS:
        raise ConfigError(
            f"{argument}.name: {called!r} is not an initializer. {suggest(name, _FUNCTIONS)}"
        )
    return name


def _check_kind(place: str, value: Any, *, is_text: bool) -> None:
    if value is None:
        return
    kinds = str if is_text else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        expected = "a string" if is_text else "a number"
        raise ConfigError(f"{place}: expected {expected}, got {value!r}.")
    if place.endswith(".std") and not float(value) > 0:
        raise ConfigError(f"{place} is {value}; it must be > 0.")
