"""Settings, environment and events of a run, for the report."""

from __future__ import annotations

import inspect
import json
import logging
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from modelzoo_trainer.base.constructor_arguments import arguments_of, plain
from modelzoo_trainer.base.devices import device_name
from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.base.versions import git_commit, versions
from modelzoo_trainer.callback import Loader
from modelzoo_trainer.core.parts.optimizer_facts import is_plain, settings_of
from modelzoo_trainer.core.parts.results import count_parameters
from modelzoo_trainer.core.parts.run_hints import hints_of
from modelzoo_trainer.loading.epochs import as_loaders
from modelzoo_trainer.loading.seeded_sampler import SeededSampler
from modelzoo_trainer.loading.train_data import num_validation_batches
from modelzoo_trainer.loggers.console.harmless import known
from modelzoo_trainer.optim.scheduler import Scheduler

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.run_record")

FACTS: Final = "run.json"
EVENTS: Final = "events.jsonl"
FORMAT_VERSION: Final = 1
MEMORY_INTERVAL_S: Final = 10.0
_PARAMS: Final = "params.yaml"  # written by the command line; has command, versions and commit
_FLUSH_INTERVAL_S: Final = 1.0
_LONGEST_CAUSE: Final = 500  # characters


class RunRecord:
    """Write `run.json` and `events.jsonl` to `logs/<time>` of a run.

    `run.json` has the environment, the settings, the sizes of the data and hints about the
    fit. `events.jsonl` has a line per event:
    `{"time": ..., "event": "validate", "step": 200, "seconds": 1.5}`. `time` is its start, in
    seconds since 1970. Events are `start`, `train_start`, `epoch`, `train_end`, `validate`,
    `save`, `memory` and `end`. There is no work per step. Write failures are logged once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._folder = trainer.artifact_dir
        self._memory = trainer.backend.memory
        self._lines: list[str] = []
        self._flushed = self._sampled = 0.0
        self._has_failed = False
        self._saving: tuple[int, float] | None = None
        self._facts: dict[str, Any] | None = None
        self._val_batches: list[int | None] = []

    def begin(self, trainer: Trainer, kind: str, loader: Loader) -> None:
        """Record the start of a fit or a validation; write `run.json` once, or again for a fit."""
        if not (self._folder / FACTS).exists():
            self._write_facts(trainer, loader, kind)
        elif kind == "fit":
            self._facts = facts = self._read_facts()
            if facts is not None and facts.get("kind") != kind:
                self._write_facts(trainer, loader, kind)
            elif facts is not None:
                none: dict[str, Any] = {}
                data = known(partial(_data, loader), none)  # may differ from an earlier fit's
                self._add(settings={**facts.get("settings", {}), "data": data})
        self.note("start", trainer.global_step, kind=kind)
        self.flush()

    def begin_fit(self, trainer: Trainer, val_dataloader: Any, eval_steps: int | None) -> None:
        """Add the sizes of the data and the hints about a fit to `run.json`."""
        if trainer.schedule.validates:
            count = partial(num_validation_batches, backend=trainer.backend, limit=eval_steps)
            loaders = as_loaders(val_dataloader, "val_dataloader")
            self._val_batches = [known(partial(count, loader), None) for loader in loaders]
        self._add(sizes=self._sizes(trainer), hints=list(hints_of(trainer, val_dataloader)))

    def end_validation(self, trainer: Trainer) -> None:
        """Add the number of batches of a validation of a fit, if it was not known before."""
        scope, _, number = trainer.name_scope_path.rstrip("/").rpartition("_")
        if scope != "validate" or not number.isdecimal() or int(number) >= len(self._val_batches):
            return
        batches = trainer.val_iterator
        is_whole = trainer.val_is_complete and trainer.val_micro_batch_size is None
        if batches is not None and is_whole and self._val_batches[int(number)] is None:
            self._val_batches[int(number)] = batches.num_yielded
            self._add(sizes=self._sizes(trainer))

    def _sizes(self, trainer: Trainer) -> dict[str, Any]:
        """Return the known sizes of the data, over all processes, named as settings."""
        nums = self._val_batches
        data = {
            "batches_per_epoch": trainer.data.num_batches_per_epoch(),
            "samples_per_batch": known(trainer.data.samples_per_batch, None),
        }
        found: dict[str, dict[str, Any]] = {
            "data": {key: num for key, num in data.items() if num is not None}
        }
        if any(num is not None for num in nums):
            found["validation"] = {"batches": nums[0] if len(nums) == 1 else list(nums)}
        return {name: sizes for name, sizes in found.items() if sizes}

    def _add(self, **added: Any) -> None:
        """Add facts to `run.json`, unless it has them."""
        facts = self._facts or self._read_facts()
        if facts is not None and any(
            new != facts.get(key, type(new)()) for key, new in added.items()
        ):
            self._store({**facts, **added})

    def _read_facts(self) -> dict[str, Any] | None:
        """Return the content of `run.json` of an earlier fit."""
        try:
            facts = json.loads(read_bytes(self._folder / FACTS))
        except (OSError, ValueError):
            return None
        return facts if isinstance(facts, dict) else None

    def begin_training(self, trainer: Trainer, grad_accum_steps: int) -> None:
        """Record the start of a train stage."""
        num = trainer.data.num_batches_per_epoch()
        self.note(
            "train_start",
            trainer.global_step,
            epoch=trainer.data.epoch,
            steps_per_epoch=math.ceil(num / grad_accum_steps) if num else None,
            total_steps=trainer.schedule.total_steps,
        )
        self.flush()

    def begin_saving(self, step: int) -> None:
        """Record the start of a checkpoint."""
        self._saving = (step, time.time())

    def end_saving(self, trainer: Trainer, path: Path) -> None:
        """Record a committed checkpoint, and how long training waited for it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        step, began = saving
        in_background = trainer.checkpoint.asynchronous and step != trainer.global_step
        seconds = None if in_background else time.time() - began
        self.note("save", step, began, seconds=seconds, name=path.name)
        self.flush()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Record the end of a fit or a validation."""
        outcome, cause = "finished", None
        if isinstance(error, (KeyboardInterrupt, SystemExit)) or trainer.interrupted:
            outcome, cause = "stopped", trainer.interrupted or type(error).__name__
        elif error is not None:
            outcome, cause = "failed", f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]
        stopped = _known_stop(trainer)
        stopped = stopped and _hidden(stopped[:_LONGEST_CAUSE])
        cause = cause and _hidden(cause)
        self.sample_memory(trainer.global_step, time.time(), interval_s=0)
        step = trainer.global_step
        self.note("end", step, outcome=outcome, cause=cause, stopped_by=stopped)
        self.flush()

    def note(self, event: str, step: int, began: float | None = None, **facts: Any) -> None:
        """Add an event, written by the next `flush`."""
        kept = {key: value for key, value in facts.items() if value is not None}
        record = {"time": began or time.time(), "event": event, "step": step, **kept}
        self._lines.append(json.dumps(record) + "\n")

    def sample_memory(
        self, step: int, now: float, *, interval_s: float = MEMORY_INTERVAL_S
    ) -> None:
        """Record the memory in use, at most once per interval."""
        if now - self._sampled >= interval_s and not self._has_failed:
            self._sampled = now
            self.note("memory", step, **self._memory())
        if now - self._flushed >= _FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write pending events."""
        lines, self._lines = self._lines, []
        self._flushed = time.time()
        if not lines or self._has_failed:
            return
        try:
            with (self._folder / EVENTS).open("a", encoding="utf-8", newline="\n") as file:
                file.write("".join(lines))
        except OSError as error:
            self._fail(EVENTS, error)

    def _write_facts(self, trainer: Trainer, loader: Loader, kind: str) -> None:
        has_params = (self._folder / _PARAMS).exists()
        try:
            facts = facts_of(trainer, loader, has_params=has_params)
        except Exception as error:  # a property of a user's class
            log.warning("The settings of the run are not saved: %s", error, exc_info=error)
            return
        self._store({**facts, "kind": kind})

    def _store(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        text = json.dumps(facts, indent=1, default=str)  # a record never ends a run
        try:
            (self._folder / FACTS).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            self._fail(FACTS, error)

    def _fail(self, name: str, error: OSError) -> None:
        if not self._has_failed:
            log.warning("%s cannot be written: %s", self._folder / name, error.strerror or error)
        self._has_failed = True


def _known_stop(trainer: Trainer) -> str | None:
    """Return what stopped the running call early, as in its result; None = nothing."""
    try:
        return trainer.summary.so_far(trainer).stopped_by
    except RuntimeError:  # it failed before it began
        return None


def facts_of(trainer: Trainer, loader: Loader, *, has_params: bool) -> dict[str, Any]:
    """Return the content of `run.json`: environment and settings.

    `has_params`: whether `params.yaml` has command, versions and commit. Its settings are named
        otherwise, and lack defaults.
    """
    comm = trainer.backend.comm
    environment = {
        "device": str(trainer.backend.device),
        "device_name": device_name(trainer.backend),
        "processes": comm.world_size,
        "host": platform.node(),
        "platform": platform.platform(),
    }
    if not has_params:
        from modelzoo_trainer.base.secrets import hide_in_command

        environment["command"] = " ".join(hide_in_command(sys.argv))
        environment["versions"] = versions()
        environment["git commit"] = git_commit()
    facts: dict[str, Any] = {"format_version": FORMAT_VERSION, "environment": environment}
    facts["settings"] = {**_settings(trainer), "data": _data(loader)}
    facts["overridden"] = sorted(_overridden(trainer))
    facts["model"] = _model(trainer)
    return facts


def _model(trainer: Trainer) -> dict[str, Any]:
    num, num_trained = count_parameters(trainer.model.parameters())
    return {
        "class": type(trainer.model).__name__,
        "parameters": num,
        "trainable": num_trained,
    }


def _model_settings(trainer: Trainer) -> dict[str, Any]:
    """Return the class of the model, its arguments as far as they are known, and its size.

    What a constructor of the user's was given is known if an attribute of that name has it; of a
    layer of torch's also what its `repr` shows.
    """
    model = trainer.model
    found = _described(model)[type(model).__name__]
    found |= _without_secrets(_plain_attributes(model, getattr(model, "__constants__", ())))
    config = getattr(getattr(model, "config", None), "to_diff_dict", None)  # of transformers
    if callable(config):
        found["config"] = _without_secrets(plain(config()))
    return {**found, "class": type(model).__name__, "parameters": _model(trainer)["parameters"]}


def _overridden(trainer: Trainer) -> Iterator[str]:
    """Yield the paths of settings of optimizers whose values schedules replace.

    torch's schedules scale the value that was given, so they replace none.
    """
    schedulers = [one for one in trainer.schedulers if isinstance(one, Scheduler)]
    is_single = list(trainer.optimizers) == ["optimizer"]
    for name, optimizer in trainer.optimizers.items():
        path = name if is_single else f"optimizers.{name}"
        for one in schedulers:
            if any(group is optimizer.param_groups[0] for group, _ in one.values_before()):
                yield f"{path}.{type(optimizer).__name__}.{one.param_group_key}"


def _settings(trainer: Trainer) -> dict[str, Any]:
    """Return the plain settings of a trainer built in Python."""
    found: dict[str, Any] = {"seed": trainer.reproducibility.seed}
    found["model"] = _model_settings(trainer)
    schedulers = [one for one in trainer.schedulers if isinstance(one, Scheduler)]
    made = {name: _optimizer(one, schedulers) for name, one in trainer.optimizers.items()}
    found |= made if list(made) == ["optimizer"] else {"optimizers": made}
    if made:
        found["schedulers"] = [_schedule(one) for one in trainer.schedulers]
    for name in ("precision", "loop", "checkpoint", "logging"):
        found[name] = _described(getattr(trainer, name))
    found["callbacks"] = [_described(one) for one in trainer.callbacks.user]
    found["loggers"] = [type(one).__name__ for one in trainer.loggers]
    return found


def _optimizer(optimizer: Optimizer, schedulers: Iterable[Scheduler]) -> dict[str, Any]:
    """Return the class of an optimizer, with its settings as given: schedules have changed them."""
    groups = settings_of(optimizer)
    settings = dict(groups[0]) if groups else {}
    if "lr" in settings:  # torch's schedules keep it
        given = optimizer.param_groups[0].get("initial_lr")
        settings["lr"] = float(given) if given is not None else settings["lr"]
    for one in schedulers:
        for group, before in one.values_before():
            if group is optimizer.param_groups[0] and one.param_group_key in settings:
                settings[one.param_group_key] = plain(before)
    if len(groups) > 1:
        settings["parameter groups"] = len(groups)
    return {type(optimizer).__name__: _without_secrets(settings)}


def _schedule(schedule: object) -> dict[str, Any]:
    """Return the class of a schedule, with its plain arguments and the schedules in it."""
    found = _described(schedule)
    members = getattr(schedule, "members", None) or getattr(schedule, "_schedulers", ())  # torch's
    if members:
        found[type(schedule).__name__]["schedulers"] = [_schedule(one) for one in members]
    return found


def _data(loader: Loader) -> dict[str, Any]:
    """Return the plain settings of a dataloader."""
    found: dict[str, Any] = {"class": type(loader).__name__}
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        found["dataset"] = type(dataset).__name__
    found |= _plain_attributes(loader, ("batch_size", "drop_last", "num_workers"))
    return found | (_order(loader) if isinstance(loader, DataLoader) else {})


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return whether a dataloader shuffles, or who says which samples it takes."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    batches: Any = loader.batch_sampler
    sampler = batches if batches is not None else loader.sampler
    if type(batches) is BatchSampler:
        sampler = batches.sampler
    if type(sampler) in (RandomSampler, SeededSampler, SequentialSampler):
        return {"shuffle": type(sampler) is not SequentialSampler}
    return {"sampler": type(sampler).__name__}


def _described(part: object) -> dict[str, Any]:
    """Return the class of a component, with its arguments: as used, otherwise as given."""
    names = inspect.signature(type(part).__init__).parameters
    used = _plain_attributes(part, (name for name in names if name != "last_epoch"))
    return {type(part).__name__: _without_secrets(arguments_of(part) | used)}


def _plain_attributes(part: object, names: Iterable[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        value = getattr(part, name, None)
        if value is not None and is_plain(value):
            found[name] = value
    return found


def _without_secrets(settings: Mapping[str, Any]) -> Any:
    from modelzoo_trainer.base.secrets import without_secrets

    return without_secrets(
        {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in settings.items()
        }
    )


def _hidden(text: str) -> str:
    from modelzoo_trainer.base.secrets import hide_in_text

    return hide_in_text(text)
