"""Convert the older layout (`train_input`, `model`, `optimizer`, `runconfig`, ...) to `trainer`.

Every value keeps its place in the file, so problems are reported there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from modelzoo_trainer.config.components import check_list
from modelzoo_trainer.config.legacy import keys
from modelzoo_trainer.config.legacy.optimizer import convert_optimizer, convert_schedulers
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
from modelzoo_trainer.config.sections import INIT_KEYS
from modelzoo_trainer.errors import suggest

log = logging.getLogger("modelzoo_trainer.config")

_NEAR: Final = 0.85  # least similarity of a misspelt key where any other key may be valid


def is_legacy(root: Node) -> bool:
    """Return whether a file has the older layout."""
    if not isinstance(root, Mapping):
        return False
    sections = [key for key in root.entries if key in keys.SECTIONS]
    others = [str(key) for key in root.entries if key not in keys.SECTIONS]
    is_trainer = any(suggest(key, ("trainer",), cutoff=_NEAR).startswith("Did") for key in others)
    return bool(sections) and not is_trainer


def convert_legacy(root: Node, problems: Problems) -> Node:
    """Convert a file of the older layout."""
    return _Conversion(Place.root(root), problems).run()


class _Conversion:
    """Converts one file."""

    def __init__(self, root: Place, problems: Problems) -> None:
        self._root = root
        self._problems = problems
        self._init = Draft(root.node.at, root.node.at)
        self._listeners: list[Node] = []

    def run(self) -> Node:
        root = self._root
        self._refuse_unknown(root, keys.SECTIONS)
        found = {key: self._section(key) for key in keys.SECTIONS if key != "sparsity"}
        loaders = {key: self._input(key, found[key]) for key in keys.INPUTS}
        self._model(found["model"])
        self._sparsity()
        runconfig = found["runconfig"]
        if runconfig is not None:
            self._runconfig(runconfig)
        self._optimizer(found["optimizer"])
        if found["wandb"] is not None:
            self._refuse_unknown(found["wandb"], keys.WANDB)
            self._move(found["wandb"], keys.WANDB)
        trainer = Draft(root.node.at, root.node.at)
        trainer.put("trainer/init", Entry(root.node.at, self._finished_init()), root)
        checkpoint = None if runconfig is None else runconfig.key("checkpoint_path")
        _put_runs(trainer, loaders["train_input"], loaders["eval_input"], checkpoint)
        return trainer.mapping()

    def _section(self, key: str) -> Place | None:
        """Return a section; None if it is missing, or (with a problem) not a mapping."""
        return self._mapping(self._root.key(key))

    def _mapping(self, place: Place | None) -> Place | None:
        if place is None or is_null(place.node):
            return None
        if not isinstance(place.node, Mapping):
            what = f"expected a mapping, got {describe(place.node)}."
            self._problems.add(place.node.at, place.path, what)
            return None
        return place

    def _input(self, key: str, section: Place | None) -> Place | None:
        """Return an input section as a dataloader."""
        if section is None:
            return None
        table = keys.INPUTS[key]
        misspelt = self._refuse_misspelt(section, table)
        self._move(section, table)
        return Place(without(section, [*table, *misspelt]), section.path, section.key_at)

    def _model(self, section: Place | None) -> None:
        if section is None:
            return
        misspelt = self._refuse_misspelt(section, keys.MODEL)
        self._move(section, keys.MODEL)
        rest = without(section, [*keys.MODEL, *misspelt])
        self._init.put("model", Entry(section.key_at, rest), section)

    def _sparsity(self) -> None:
        """Move the section, which may be a number, a mapping or a list of mappings."""
        place = self._root.key("sparsity")
        if place is None or is_null(place.node):
            return
        node = place.node
        parts = [place, *place.items()]
        switches = [inner for part in parts if (inner := part.key("add_summaries")) is not None]
        on = [switch for switch in switches if self._boolean(switch)]
        if on:
            self._switch(on[0], "LogSparsity", place)
        if isinstance(node, Sequence):
            node = Sequence(tuple(_without_summaries(item) for item in place.items()), node.at)
        else:
            node = _without_summaries(place)
        if not (isinstance(node, Mapping) and not node.entries):
            self._init.put("sparsity", Entry(place.key_at, node), place)

    def _optimizer(self, section: Place | None) -> None:
        if section is None:
            return
        moved = [*keys.OPTIMIZER, *keys.OPTIMIZER_OTHERS]
        misspelt = self._refuse_misspelt(section, moved)
        self._move(section, keys.OPTIMIZER)
        self._switch(section.key("log_summaries"), "ComputeNorm", section)
        rest = Place(without(section, misspelt), section.path, section.key_at)
        optimizer = convert_optimizer(rest, self._problems)
        if optimizer is not None:
            self._init.put("optimizer", Entry(section.key_at, optimizer), section)
        schedulers = convert_schedulers(rest, self._problems)
        if schedulers is not None:
            self._init.put("schedulers", schedulers, section)

    def _runconfig(self, section: Place) -> None:
        switches = keys.RUNCONFIG_SWITCHES
        known = (*keys.RUNCONFIG, *switches, *keys.RUNCONFIG_OTHERS)
        self._refuse_unknown(section, known)
        self._move(section, keys.RUNCONFIG)
        for key, name in switches.items():
            self._switch(section.key(key), name, section)
        experimental = self._mapping(section.key("experimental"))
        if experimental is not None:
            self._refuse_unknown(experimental, ("listeners",))
            listeners = check_list(experimental.key("listeners"), "listener", self._problems)
            self._listeners = [node for item in listeners for node in self._listener(item)]
        if section.key("mode") is not None:
            log.info("runconfig.mode is ignored: the command line selects the mode.")

    def _listener(self, place: Place) -> list[Node]:
        """Return the callback of `{listener_type: Class, ...arguments}`."""
        kind = place.key("listener_type")
        name = kind.node.value if kind is not None and isinstance(kind.node, Scalar) else None
        if kind is None or not isinstance(name, str):
            at = place.node.at if kind is None else kind.node.at
            what = "missing" if kind is None else f"got {describe(kind.node)}"
            path = place.path_of("listener_type")
            self._problems.add(at, path, f"{what}; expected the class of the listener.")
            return []
        arguments = Entry(kind.node.at, without(place, ["listener_type"]))
        return [Mapping({name: arguments}, place.node.at)]

    def _move(self, section: Place, table: keys.Table) -> None:
        """Move the keys in `table` to their new places; null adds no callback."""
        for key, place in section.pairs():
            target = table.get(key)
            if target is None:
                continue
            is_installed = target.startswith(("callbacks/", "loggers/"))
            if not (is_installed and is_null(place.node)):
                self._init.put(target, place.entry, section)

    def _switch(self, place: Place | None, name: str, section: Place) -> None:
        """Add the callback `name`, or remove it from the defaults if it is one of them."""
        value = None if place is None else self._boolean(place)
        if place is None or value is None:
            return
        if value or name in keys.DEFAULT_CALLBACKS:
            at = place.node.at
            node = Mapping({}, at) if value else Scalar(None, at)
            self._init.put(f"callbacks/{name}", Entry(place.key_at, node), section)

    def _boolean(self, place: Place) -> bool | None:
        """Return a boolean; None if it is null or something else, which is a problem."""
        if isinstance(place.node, Scalar) and isinstance(place.node.value, bool):
            return place.node.value
        if not is_null(place.node):
            what = f"expected true or false, got {describe(place.node)}."
            self._problems.add(place.node.at, place.path, what)
        return None

    def _refuse_unknown(self, section: Place, known: Collection[str]) -> None:
        """Add all keys that are not in `known`."""
        what = section.path or "the older layout"
        for key, place in section.pairs():
            if key not in known:
                advice = _gone(place) or _elsewhere(str(key), section)
                text = f"no such key in {what}. {advice or self._problems.suggest(str(key), known)}"
                self._problems.add(place.key_at, place.path, text.rstrip())

    def _refuse_misspelt(self, section: Place, known: Collection[str]) -> list[str]:
        """Add and return the keys that are almost in `known`, or removed; others may be valid."""
        found = []
        for key, place in section.pairs():
            near = suggest(str(key), known, cutoff=_NEAR)
            advice = _gone(place) or (near if near.startswith("Did") else "")
            if key not in known and advice:
                what = f"no such key in {section.path}. {advice}"
                self._problems.add(place.key_at, place.path, what)
                found.append(key)
        return found

    def _finished_init(self) -> Mapping:
        """Return `init`, its callbacks and loggers as lists."""
        if self._listeners:
            self._init.inside("callbacks", self._root.key("runconfig") or self._root)
        self._init.list_components("callbacks", keys.CALLBACK_ORDER, self._listeners)
        self._init.list_components("loggers", keys.LOGGER_ORDER)
        return self._init.mapping(INIT_KEYS)


def _put_runs(
    trainer: Draft, train: Place | None, validation: Place | None, checkpoint: Place | None
) -> None:
    """Add the sections fit, validate and validate_all as far as there are inputs for them."""
    runs = {
        "fit": (train, {"train_dataloader": train, "val_dataloader": validation}, "ckpt_path"),
        "validate": (validation, {"val_dataloader": validation}, "ckpt_path"),
        "validate_all": (validation, {"val_dataloaders": validation}, "ckpt_paths"),
    }
    for method, (needed, dataloaders, path_key) in runs.items():
        if needed is None:
            continue
        for key, place in {**dataloaders, path_key: checkpoint}.items():
            if place is not None:
                trainer.put(f"trainer/{method}/{key}", place.entry, needed)


def _without_summaries(place: Place) -> Node:
    if isinstance(place.node, Mapping):
        return without(place, ["add_summaries"])
    return place.node


def _gone(place: Place) -> str:
    return keys.GONE.get(place.path, "")


def _elsewhere(key: str, section: Place) -> str:
    """Return advice for a key in the wrong section."""
    tables = {
        "runconfig": (*keys.RUNCONFIG, *keys.RUNCONFIG_SWITCHES, *keys.RUNCONFIG_OTHERS),
        "optimizer": (*keys.OPTIMIZER, *keys.OPTIMIZER_OTHERS),
        "model": tuple(keys.MODEL),
        "wandb": tuple(keys.WANDB),
    }
    home = next((name for name, known in tables.items() if key in known), None)
    return "" if home in (None, section.path) else f"It belongs in {home}."


class Draft:
    """A mapping to which values are added by path; mappings in between are created."""

    def __init__(self, key_at: FilePosition, at: FilePosition) -> None:
        self.key_at = key_at
        self.at = at
        self._entries: dict[str, Entry | Draft] = {}

    def put(self, path: str, entry: Entry, section: Place) -> None:
        """Add a value."""
        first, _, rest = path.partition("/")
        if not rest:
            self._entries[first] = entry
            return
        self.inside(first, section).put(rest, entry, section)

    def inside(self, key: str, section: Place) -> Draft:
        """Return the mapping at `key`, created if it is missing."""
        inner = self._entries.setdefault(key, Draft(section.key_at, section.node.at))
        assert isinstance(inner, Draft)  # no value is put above another one
        return inner

    def list_components(self, key: str, order: Iterable[str], more: Iterable[Node] = ()) -> None:
        """Convert the mapping at `key`, if any, to a list of mappings with one key each."""
        inner = self._entries.get(key)
        if isinstance(inner, Draft):
            items = [Mapping({name: entry}, entry.key_at) for name, entry in inner._ordered(order)]
            self._entries[key] = Entry(inner.key_at, Sequence((*items, *more), inner.at))

    def mapping(self, order: Iterable[str] | None = None) -> Mapping:
        """Return the mapping.

        `order`: of the keys; None = as they were added.
        """
        return Mapping(dict(self._ordered(order)), self.at)

    def _ordered(self, order: Iterable[str] | None) -> Iterable[tuple[str, Entry]]:
        for key in self._entries if order is None else order:
            value = self._entries.get(key)
            if isinstance(value, Draft):
                yield key, Entry(value.key_at, value.mapping())
            elif value is not None:
                yield key, value


def without(place: Place, keys: Iterable[str]) -> Mapping:
    """Return the mapping at `place` without some of its keys."""
    left_out = set(keys)
    kept = {key: inner.entry for key, inner in place.pairs() if key not in left_out}
    return Mapping(kept, place.node.at)
