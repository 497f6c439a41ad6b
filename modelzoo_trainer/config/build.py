"""From a checked file to trainers: plans first, objects when a plan is carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from modelzoo_trainer.config.components import Component, check_keys, check_list
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.positions import Node, Place, Sequence, is_null, to_plain
from modelzoo_trainer.config.problems import Problems
from modelzoo_trainer.config.sections import (
    OPTIONAL_INT,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    check_dataloader,
    check_device,
    check_installed,
    check_model,
    check_optimizer,
    check_plain,
    check_scheduler,
    check_section,
    dataloader_factory,
)

# mode -> the section that it runs, which is the trainer's method as well
MODES: Final = {
    "train": "fit",
    "train_and_eval": "fit",
    "eval": "validate",
    "eval_all": "validate_all",
}
INIT_KEYS: Final = (
    "device",
    "backend",
    "model_dir",
    "model",
    "optimizer",
    "schedulers",
    "precision",
    "sparsity",
    "loop",
    "checkpoint",
    "logging",
    "callbacks",
    "loggers",
    "seed",
    "autorestart",
)
_TRAINER_KEYS: Final = ("init", "fit", "validate", "validate_all")
_FIXED: Final = ("precision", "loop", "checkpoint", "logging")
_NOT_YET: Final = ("sparsity", "autorestart")


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """One trainer of a file, checked: what it is made of and what it will run.

    Args:
        trainer: Makes the trainer from keyword arguments.
        init: Its arguments; components are built by `build`.
        defaults: Callbacks and loggers that the file neither names nor removes.
        method: "fit", "validate" or "validate_all".
        call: The method's arguments; dataloaders are built when it asks for them.
        resolved: What the file says of this trainer, options of the command line included; as
            YAML (`resolved.to_yaml`) it is a configuration itself.
    """

    trainer: Callable[..., Any]
    init: dict[str, Any]
    defaults: dict[str, list[Any]]
    method: str
    call: dict[str, Any]
    resolved: dict[str, Any]

    def build(self) -> Any:
        """Return the trainer.

        Raises:
            ConfigError: If a class refuses its arguments; with the place in the file.
        """
        arguments: dict[str, Any] = {}
        for key, value in self.init.items():
            if key in ("model", "optimizer"):
                arguments[key] = value.build
            elif key == "schedulers":
                arguments[key] = [component.build for component in value]
            elif key in self.defaults:
                built = [component.build() for component in value]
                arguments[key] = built + self.defaults[key]
            else:
                arguments[key] = value.build() if isinstance(value, Component) else value
        return self.trainer(**arguments)

    def run(self, trainer: Any) -> None:
        """Run what the mode asks for.

        Args:
            trainer: As `build` returned it.
        """
        getattr(trainer, self.method)(**self.call)


def check_config(root: Node, names: Names, mode: str = "train_and_eval") -> list[TrainerPlan]:
    """Return the trainers of a file, all of it checked, nothing built.

    Args:
        root: The file, overrides applied.
        names: What it may name.
        mode: One of `MODES`.

    Raises:
        ConfigError: If anything in it is wrong, also in sections that the mode does not use; all
            problems together, one line each.
    """
    problems = Problems()
    place = Place.root(root)
    check_keys(place, ("trainer",), ("trainer",), problems)
    trainers = _trainers(place.key("trainer"), problems)
    plans = [_Checking(trainer, names, mode, problems).plan() for trainer in trainers]
    problems.raise_if_any()
    return plans


def _trainers(place: Place | None, problems: Problems) -> list[Place]:
    if place is None or is_null(place.node):
        return []
    if not isinstance(place.node, Sequence):
        return [place]
    if not place.node.items:
        problems.add(place.node.at, place.path, "the list is empty; it should hold trainers.")
    found = []
    for item in place.items():
        inner = item.key("trainer")
        if check_keys(item, ("trainer",), ("trainer",), problems) and inner is not None:
            found.append(inner)
    return found


class _Checking:
    """One trainer on its way from the file to a plan."""

    def __init__(self, place: Place, names: Names, mode: str, problems: Problems) -> None:
        self._place = place
        self._names = names
        self._mode = mode
        self._problems = problems

    def plan(self) -> TrainerPlan:
        method = MODES[self._mode]
        init: dict[str, Any] = {}
        calls: dict[str, dict[str, Any]] = {}
        defaults: dict[str, list[Any]] = {}
        if check_keys(self._place, _TRAINER_KEYS, ("init",), self._problems):
            place = self._place.key("init")
            if place is not None and not is_null(place.node):
                init, defaults = self._init(place)
            calls = {key: self._section(key) for key in _TRAINER_KEYS[1:]}
        resolved = {"trainer": to_plain(self._place.node)}
        return TrainerPlan(
            self._names.trainer, init, defaults, method, calls.get(method, {}), resolved
        )

    def _init(self, place: Place) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        names, problems = self._names, self._problems
        if not check_keys(place, INIT_KEYS, ("model",), problems):
            return {}, {}
        given = {key: inner for key, inner in place.pairs() if not is_null(inner.node)}
        init = self._plain(given)
        if "model" in given:
            init["model"] = check_model(given["model"], names, problems)
        init |= self._optimizer(place, given)
        init |= self._fixed(place, given)
        callbacks, loggers = given.get("callbacks"), given.get("loggers")
        defaults: dict[str, list[Any]] = {}
        init["callbacks"], defaults["callbacks"] = check_installed(
            callbacks, names.callbacks, list(names.default_callbacks()), problems
        )
        init["loggers"], defaults["loggers"] = check_installed(
            loggers, names.loggers, list(names.default_loggers()), problems
        )
        return init, defaults

    def _plain(self, given: dict[str, Place]) -> dict[str, Any]:
        """Return the settings that are no components."""
        names, problems = self._names, self._problems
        device, options = check_device(given.get("device"), given.get("backend"), names, problems)
        found: dict[str, Any] = {}
        if device is not None:
            found["device"] = device
        if options:
            found["backend"] = options
        for key, annotation in (("model_dir", OPTIONAL_PATH), ("seed", OPTIONAL_INT)):
            if key in given:
                found[key] = check_plain(given[key], annotation, problems)
        for key in _NOT_YET:
            if key in given:
                at, path = given[key].key_at, given[key].path
                problems.add(at, path, "is not part of this version. Leave it out, or write null.")
        return found

    def _fixed(self, place: Place, given: dict[str, Place]) -> dict[str, Any]:
        """Return the sections whose class is fixed; without validation in mode train."""
        found: dict[str, Any] = {
            key: check_section(key, given[key], self._names, self._problems)
            for key in _FIXED
            if key in given
        }
        if self._mode == "train":
            target = self._names.sections["loop"]
            loop = found.get("loop") or Component(target, {}, place.key_at, "trainer.init.loop")
            loop.arguments["eval_frequency"] = None
            found["loop"] = loop
        return found

    def _optimizer(self, place: Place, given: dict[str, Place]) -> dict[str, Any]:
        """Return optimizer and schedulers: checked always, used in training only."""
        names, problems = self._names, self._problems
        found: dict[str, Any] = {}
        if "optimizer" in given:
            found["optimizer"] = check_optimizer(given["optimizer"], names, problems)
        found["schedulers"] = [
            check_scheduler(item, names, problems)
            for item in check_list(given.get("schedulers"), "scheduler", problems)
        ]
        if MODES[self._mode] != "fit":
            return {}
        if "optimizer" not in found:
            path = place.path_of("optimizer")
            problems.add(place.key_at, path, f"missing; mode {self._mode} needs it.")
        return found

    def _section(self, key: str) -> dict[str, Any]:
        """Return the arguments of a method of the trainer."""
        place = self._place.key(key)
        is_needed = MODES[self._mode] == key
        if place is None or (is_null(place.node) and key != "validate_all"):
            if is_needed:
                path = self._place.path_of(key)
                what = f"missing; mode {self._mode} needs it."
                self._problems.add(self._place.key_at, path, what)
            return {}
        checks = {"fit": self._fit, "validate": self._validate, "validate_all": self._validate_all}
        return checks[key](place)

    def _fit(self, place: Place) -> dict[str, Any]:
        keys = ("train_dataloader", "val_dataloader", "ckpt_path")
        if not check_keys(place, keys, keys[:1], self._problems):
            return {}
        call = self._one(place, "train_dataloader") | self._path(place, "ckpt_path", OPTIONAL_TEXT)
        validation = self._one_or_several(place, "val_dataloader")
        return call if self._mode == "train" else call | validation

    def _validate(self, place: Place) -> dict[str, Any]:
        keys = ("val_dataloader", "ckpt_path")
        if not check_keys(place, keys, keys[:1], self._problems):
            return {}
        return self._one(place, "val_dataloader") | self._path(place, "ckpt_path", OPTIONAL_TEXT)

    def _validate_all(self, place: Place) -> dict[str, Any]:
        keys = ("val_dataloaders", "ckpt_paths")
        if is_null(place.node) or not check_keys(place, keys, (), self._problems):
            return {}
        paths = self._path(place, "ckpt_paths", str | list[str] | None)
        return self._one_or_several(place, "val_dataloaders") | paths

    def _one(self, place: Place, key: str) -> dict[str, Any]:
        inner = place.key(key)
        if inner is None or is_null(inner.node):
            return {}
        component = check_dataloader(inner, self._names, self._problems)
        return {} if component is None else {key: dataloader_factory(component)}

    def _one_or_several(self, place: Place, key: str) -> dict[str, Any]:
        inner = place.key(key)
        if inner is None or not isinstance(inner.node, Sequence):
            return self._one(place, key)
        found = [check_dataloader(item, self._names, self._problems) for item in inner.items()]
        return {key: [dataloader_factory(component) for component in found if component]}

    def _path(self, place: Place, key: str, annotation: Any) -> dict[str, Any]:
        inner = place.key(key)
        return {} if inner is None else {key: check_plain(inner, annotation, self._problems)}
