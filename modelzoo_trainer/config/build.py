"""Read a YAML file, apply overrides and check it; nothing is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.secrets import HIDDEN, hiding, stands_for_secret, without_secrets
from modelzoo_trainer.checkpointing.stores.urls import is_url, parse_url
from modelzoo_trainer.config.components import Component, check_keys, check_list, check_plain
from modelzoo_trainer.config.device import check_device
from modelzoo_trainer.config.former_paths import note_former_paths
from modelzoo_trainer.config.legacy import convert_legacy, is_legacy
from modelzoo_trainer.config.loader import read_file, to_yaml
from modelzoo_trainer.config.model_zoo_root import with_advice, with_root
from modelzoo_trainer.config.modes import MODES
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.overrides import Override, apply_overrides, changes_of, parse_override
from modelzoo_trainer.config.plan import METHODS, TrainerPlan
from modelzoo_trainer.config.positions import (
    Lack,
    Node,
    Place,
    Problems,
    Scalar,
    Sequence,
    is_null,
    to_plain,
)
from modelzoo_trainer.config.sections import (
    INIT_KEYS,
    OPTIONAL_CALL,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    OPTIONAL_TEXTS,
    PROGRESS,
    SEED,
    check_dataloader,
    check_installed,
    check_model,
    check_optimizer,
    check_scheduler,
    check_section,
    check_together,
)
from modelzoo_trainer.config.sparsity import check_sparsity
from modelzoo_trainer.errors import ConfigError

TRAINER_KEYS: Final = ("init", *METHODS)

_PREFERRED: Final = ("train_and_eval", "eval", "eval_all", "test", "predict")


def check_config(
    root: Node,
    names: Names,
    mode: str | None = "train_and_eval",
    problems: Problems | None = None,
) -> list[TrainerPlan]:
    """Check a whole file and return the plans of its trainers; nothing is built.

    `mode`: one of `MODES`; None = the first that the file has a section for. `problems`: those
    found before; None = none, for a run.

    Raises:
        ConfigError: If anything is invalid, even in sections that the mode does not use; all
            problems together, one line each.
    """
    problems = Problems() if problems is None else problems
    problems.hide = hiding(to_plain(root))
    place = Place.root(root)
    _check_hidden(place, problems)
    check_keys(place, ("trainer",), ("trainer",), problems)
    plans = [
        _Checking(trainer, names, mode, problems.of_one_trainer(), is_first=not number).plan()
        for number, trainer in enumerate(_trainers(place.key("trainer"), problems))
    ]
    problems.raise_if_any()
    return plans


def _check_hidden(place: Place, problems: Problems) -> None:
    """Add a problem for each placeholder of a secret, as saved configurations have them."""
    for _, inner in place.pairs():
        _check_hidden(inner, problems)
    for inner in place.items():
        _check_hidden(inner, problems)
    if isinstance(place.node, Scalar) and stands_for_secret(place.node.value):
        what = (
            f"contains {HIDDEN} in place of a secret. Write the secret there or pass it with --set."
        )
        problems.add_to_run(place.node.at, place.path, what, Lack("secret", place.path))


def _trainers(place: Place | None, problems: Problems) -> list[Place]:
    if place is None or is_null(place.node):
        return []
    if not isinstance(place.node, Sequence):
        return [place]
    if not place.node.items:
        problems.add(place.node.at, place.path, "the list is empty; expected trainers.")
    found = []
    for item in place.items():
        inner = item.key("trainer")
        if check_keys(item, ("trainer",), ("trainer",), problems) and inner is not None:
            found.append(inner)
    return found


class _Checking:
    """Checks one trainer of a file and makes its plan."""

    def __init__(
        self,
        place: Place,
        names: Names,
        mode: str | None,
        problems: Problems,
        *,
        is_first: bool,
    ) -> None:
        self._is_first = is_first
        self._place = place
        self._names = names
        self._mode = mode or next((one for one in _PREFERRED if self._has(place, one)), None)
        self._method = None if self._mode is None else MODES[self._mode]
        self._problems = problems
        self._model: Component | None = None  # found by `_init`; None = it has problems

    @staticmethod
    def _has(place: Place, mode: str) -> bool:
        return place.key(MODES[mode]) is not None

    def plan(self) -> TrainerPlan:
        init: dict[str, Any] = {}
        calls: dict[str, dict[str, Any]] = {}
        defaults: dict[str, list[Any]] = {}
        if check_keys(self._place, TRAINER_KEYS, ("init",), self._problems):
            place = self._place.key("init")
            if place is not None and not is_null(place.node):
                init, defaults = self._init(place)
            calls = {key: self._section(key) for key in TRAINER_KEYS[1:]}
        note_former_paths(self._place, self._problems)
        if self._mode is None:
            what = f"has none of {', '.join(METHODS)}: there is nothing to run."
            self._problems.note(self._place.key_at, self._place.path, what)
        return TrainerPlan(
            trainer=self._names.trainer,
            init=init,
            defaults=defaults,
            mode=self._mode,
            call={} if self._method is None else calls.get(self._method, {}),
            resolved={"trainer": to_plain(self._place.node, self._problems.whole_numbers)},
            notes=self._problems.notes,
        )

    def _init(self, place: Place) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        names, problems = self._names, self._problems
        if not check_keys(place, INIT_KEYS, ("model",), problems):
            return {}, {}
        given = {key: inner for key, inner in place.pairs() if not is_null(inner.node)}
        init = self._plain(given)
        if "model" in given:
            num_before = problems.num_added
            model = check_model(given["model"], names, problems)
            init |= {} if model is None else {"model": model}
            self._model = model if problems.num_added == num_before else None
        init |= self._optimizer(place, given)
        init |= self._fixed(place, given)
        callbacks, loggers = given.get("callbacks"), given.get("loggers")
        defaults: dict[str, list[Any]] = {}
        init["callbacks"], defaults["callbacks"] = check_installed(
            callbacks,
            names.callbacks,
            list(names.default_callbacks()),
            problems,
            names.try_callback,
        )
        init["loggers"], defaults["loggers"] = check_installed(
            loggers, names.loggers, list(names.default_loggers()), problems, names.try_callback
        )
        if init.get("progress") is None and self._removes_console(init, defaults):
            init["progress"] = "none"
        return init, defaults

    def _removes_console(self, init: dict[str, Any], defaults: dict[str, list[Any]]) -> bool:
        """Return whether the list of loggers removes the one that draws on the console."""
        own = [component.target for component in init["loggers"]]
        own += [type(default) for default in defaults["loggers"]]
        known = [type(default) for default in self._names.default_loggers()]
        return any(map(_draws, known)) and not any(map(_draws, own))

    def _plain(self, given: dict[str, Place]) -> dict[str, Any]:
        """Return the settings that are not components."""
        names, problems = self._names, self._problems
        device, options = check_device(given.get("device"), given.get("backend"), names, problems)
        found: dict[str, Any] = {}
        if device is not None:
            found["device"] = device
        if options:
            found["backend"] = options
        plain = {
            "model_dir": OPTIONAL_PATH,
            "seed": SEED,
            "call_model": OPTIONAL_CALL,
            "progress": PROGRESS,
        }
        for key, annotation in plain.items():
            if key in given:
                found[key] = check_plain(given[key], annotation, problems)
        if is_url(str(found.get("model_dir"))):  # a path would lose a slash
            found["model_dir"] = self._url(given["model_dir"])
        if "sparsity" in given:
            sparsity = check_sparsity(given["sparsity"], problems)
            found |= {} if sparsity is None else {"sparsity": sparsity}
        return found

    def _url(self, place: Place) -> str | None:
        """Return the URL of an object store; only its form is checked."""
        text = check_plain(place, OPTIONAL_TEXT, self._problems)
        try:
            parse_url(text, "model_dir")
        except ConfigError as error:
            self._problems.add(place.node.at, place.path, str(error).removeprefix("model_dir: "))
        return text  # type: ignore[no-any-return]  # checked

    def _fixed(self, place: Place, given: dict[str, Place]) -> dict[str, Any]:
        """Return the sections with a fixed class; mode train turns validation off."""
        found: dict[str, Any] = {
            key: check_section(key, given[key], self._names, self._problems)
            for key in self._names.sections
            if key in given
        }
        if self._mode == "train":
            target = self._names.sections["loop"]
            loop = found.get("loop") or Component(target, {}, place.key_at, "trainer.init.loop")
            loop.arguments["eval_frequency"] = None
            found["loop"] = loop
        return found

    def _optimizer(self, place: Place, given: dict[str, Place]) -> dict[str, Any]:
        """Return optimizer and schedulers: always checked, used only in training."""
        names, problems = self._names, self._problems
        found: dict[str, Any] = {}
        if "optimizer" in given:
            found["optimizer"] = check_optimizer(given["optimizer"], names, problems)
        num_before = problems.num_added
        items = check_list(given.get("schedulers"), "scheduler", problems)
        found["schedulers"] = [check_scheduler(item, names, problems) for item in items]
        if problems.num_added == num_before:
            check_together(found.get("optimizer"), found["schedulers"], items, names, problems)
        if self._method != "fit":
            return {}
        if "optimizer" not in found:
            path = place.path_of("optimizer")
            null = place.key("optimizer")
            at = place.key_at if null is None else null.key_at
            problems.add(at, path, f"missing; the command {self._method!r} requires it.")
        return found

    def _section(self, key: str) -> dict[str, Any]:
        """Return the arguments of a method of the trainer."""
        place, method = self._place.key(key), METHODS[key]
        if place is None or (is_null(place.node) and method.is_needed):
            if self._method == key:
                path = self._place.path_of(key)
                what = f"missing; the command {key!r} requires this section."
                at = self._place.key_at if place is None else place.key_at
                self._problems.add(at, path, what)
            return {}
        required = (method.dataloader,) if method.is_needed else ()
        if is_null(place.node) or not check_keys(place, method.keys, required, self._problems):
            return {}
        call: dict[str, Any] = {}
        for name in (method.dataloader, *method.others):
            found = self._several(place, name) if name == method.several else self._one(place, name)
            if self._mode != "train" or name == method.dataloader:
                call |= found
        call |= self._path(place, method.ckpt)
        for name, annotation in method.plain.items():
            inner = place.key(name)
            if inner is not None:
                call[name] = check_plain(inner, annotation, self._problems)
        return call

    def _one(self, place: Place, key: str) -> dict[str, Any]:
        inner = place.key(key)
        if inner is None or is_null(inner.node):
            return {}
        component = self._dataloader(inner)
        return {} if component is None else {key: component}

    def _dataloader(self, place: Place) -> Component | None:
        return check_dataloader(place, self._names, self._problems, self._model)

    def _several(self, place: Place, key: str) -> dict[str, Any]:
        inner = place.key(key)
        if inner is None or not isinstance(inner.node, Sequence):
            return self._one(place, key)
        if not inner.node.items:
            what = "the list is empty. Add a dataloader, or remove the key."
            self._problems.add(inner.key_at, inner.path, what)
        found = [self._dataloader(item) for item in inner.items()]
        return {key: [component for component in found if component is not None]}

    def _path(self, place: Place, key: str) -> dict[str, Any]:
        inner = place.key(key)
        if inner is None:
            return {}
        annotation = OPTIONAL_TEXT if key == "ckpt_path" else OPTIONAL_TEXTS
        value = with_root(check_plain(inner, annotation, self._problems))
        if value == "":
            what = "is empty. Write the path of a checkpoint, or null to start without one."
            self._problems.add(inner.node.at, inner.path, what)
        elif key == "ckpt_path" and isinstance(value, str) and self._needs_now(place):
            for what in map(with_advice, self._names.try_checkpoint(value)):
                lack = Lack("checkpoint", value)
                self._problems.add_to_run(inner.node.at, inner.path, what, lack)
        return {key: value}

    def _needs_now(self, place: Place) -> bool:
        """Return whether a section runs first; later trainers may use what earlier ones write."""
        return self._is_first and self._method == place.path.rpartition(".")[2]


def _draws(target: Any) -> bool:
    return bool(getattr(target, "draws_console", False))


def load_plans(
    path: Path,
    names: Callable[[], Names],
    *,
    mode: str | None = "train_and_eval",
    changes: Iterable[str] = (),
    options: Mapping[str, str | None] | None = None,
    for_a_run: bool = True,
) -> list[TrainerPlan]:
    """Read and check a file and return the plans of its trainers; nothing is built.

    `path`: the file; one of the older layout is converted, with a note that shows the new one.
    `names`: makes what the file may name; called when its syntax is known to be valid, because that
    imports torch. `mode`: a key of `MODES`; None = the first that the file has a section for.
    `changes`: as for `--set`, `PATH=VALUE`; applied in order, after `options`. `options`: values
    for `options.OPTIONS` by name.

    Raises:
        ConfigError: If anything is invalid; one line for each problem.
    """
    overrides = _overrides(changes)
    problems = Problems(for_a_run=for_a_run)
    root = read_file(path)
    if is_legacy(root):
        root = _convert(root, problems)
    root = apply_overrides(root, [*changes_of(options or {}, mode, root), *overrides])
    return check_config(root, names(), mode, problems)


def _convert(root: Node, problems: Problems) -> Node:
    converted = convert_legacy(root, problems)
    if not problems.num_added:
        text = to_yaml(without_secrets(to_plain(converted))).rstrip()
        what = (
            f"has the older layout. This is the file in the current layout, without the overrides "
            f"of the command line:\n\n{text}\n"
        )
        problems.note(root.at, "", what)
    return converted


def _overrides(changes: Iterable[str]) -> list[Override]:
    """Return the parsed overrides; all errors are raised together."""
    parsed, wrong = [], []
    for change in changes:
        try:
            parsed.append(parse_override(change))
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return parsed
