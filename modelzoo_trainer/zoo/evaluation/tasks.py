"""Find and load tasks of `lm_eval`, with errors that say what to do."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, reason_of, suggest
from modelzoo_trainer.zoo.evaluation.arguments import HarnessArguments

log = logging.getLogger("modelzoo_trainer.evaluation")

# Warnings that arguments in eeh_args replace settings of tasks, which is what they are for.
_OF_SETTINGS: Final = ("generation_kwargs: %s specified through cli", "Overwriting default num_fe")
_PATTERN: Final = frozenset("*?[")
_INSTALL: Final = 'pip install "modelzoo-trainer[eval]"'


def require_lm_eval(key: str) -> None:
    """Raise a `ConfigError` if the library is not installed; `key`: what needs it."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{key} requires the library lm_eval, which cannot be imported ({error}). Install it: "
            f"{_INSTALL}"
        ) from None


class LoadedTasks:
    """Tasks with their data, in place of a `TaskManager` of `lm_eval`; loaded once for a run."""

    def __init__(self, arguments: HarnessArguments) -> None:
        self._tasks, self.task_index = _load(arguments)
        self.names = sorted(self._tasks["tasks"])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tasks["tasks"].values())

    def load(self, names: Any) -> dict[str, Any]:
        """Return the tasks; `names` is ignored."""
        for task in self:
            task._instances = None  # requests and answers of the last evaluation
        return self._tasks


def _load(arguments: HarnessArguments) -> tuple[dict[str, Any], dict[str, Any]]:
    from lm_eval.tasks import TaskManager

    for folder in arguments.folders:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(f"eeh_args.include_path: {folder!r} is not a folder. Correct it.")
    folders = [str(Path(folder).expanduser()) for folder in arguments.folders]
    if folders:  # reading the 10,000 files of lm_eval takes a while
        own = TaskManager(include_path=folders, include_defaults=False)
        if all(_known(name, own) for name in arguments.names):
            try:
                return _loaded(arguments, own), own.task_index
            except KeyError:
                log.debug("A group of %s has tasks of lm_eval.", folders)
    whole = TaskManager(include_path=folders or None)
    try:
        return _loaded(arguments, whole), whole.task_index
    except KeyError as error:
        raise ConfigError(
            f"eeh_args.tasks: the tasks {', '.join(arguments.names)} cannot be loaded: one of them "
            f"names {error}, a split or a task, which does not exist. Correct its YAML file."
        ) from error


def _known(name: str, manager: Any) -> bool:
    if _PATTERN & set(name) and manager.match_tasks([name]):
        return True
    return name in manager.task_index or Path(name).is_file()


def _loaded(arguments: HarnessArguments, manager: Any) -> dict[str, Any]:
    """Return what `TaskManager.load` returns for the names and patterns.

    Raises:
        ConfigError: If there is no such task, or it cannot be loaded or run here.
        KeyError: If a group has a task that the manager does not know.
    """
    found: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in dict.fromkeys(_expanded(arguments.names, manager)):
        loaded = _load_one(name, manager)
        twice = found["tasks"].keys() & loaded["tasks"].keys()
        if twice:
            raise ConfigError(
                f"eeh_args.tasks: the task {min(twice)!r} is named twice, by itself or in a group. "
                f"Name it once."
            )
        for key, value in loaded.items():
            found[key] |= value
    for name, task in found["tasks"].items():
        _check_task(name, task, runs_code=arguments.confirm_run_unsafe_code)
        _check_prompts(name, task, arguments)
    return found


def _expanded(names: Sequence[str], manager: Any) -> Iterator[str]:
    for name in names:
        if name in manager.task_index or Path(name).is_file():
            yield name
            continue
        matches = manager.match_tasks([name]) if _PATTERN & set(name) else []
        if not matches:
            advice = suggest(name, manager.task_index, cutoff=0.7)
            advice = advice if advice.startswith("Did") else "`lm_eval ls tasks` lists them."
            raise ConfigError(
                f"eeh_args.tasks: lm_eval has no task, group or tag {name!r}. {advice} "
                f"Set include_path for tasks of your own."
            )
        yield from matches


def _load_one(name: str, manager: Any) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = manager.load([name])
    except KeyError:
        raise
    except Exception as error:  # whatever its data or its code raises
        advice = "Correct its YAML file."
        if isinstance(error, OSError):
            advice = (
                "Its data are read with the library datasets; without a network they must be in "
                "its cache (HF_HOME): load the task once where there is a network, and copy that "
                "folder."
            )
        raise ConfigError(
            f"eeh_args.tasks: the task {name!r} cannot be loaded ({_first_line(error)}). {advice}"
        ) from error
    return loaded


def _check_task(name: str, task: Any, *, runs_code: bool) -> None:
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(
            f"eeh_args.tasks: {name!r} has images or sound, which is not supported. Remove it."
        )
    if getattr(task, "UNSAFE_CODE", False) and not runs_code:
        raise ConfigError(
            f"eeh_args.tasks: {name!r} runs code that the model writes, in this process. Remove "
            f"it, or set confirm_run_unsafe_code: true where that does no harm."
        )
    if task.get_config("process_results") is None:
        functions: dict[str, Any] = getattr(task, "_metric_fn_list", {})
        for metric, function in functions.items():
            if function is None:  # lm_eval would leave it out of the results
                known = import_module("lm_eval.api.registry").METRIC_REGISTRY
                raise ConfigError(
                    f"eeh_args.tasks: the metric {metric!r} of the task {name!r} is in neither "
                    f"lm_eval nor the library evaluate. {suggest(metric, known)}"
                )


def _check_prompts(name: str, task: Any, arguments: HarnessArguments) -> None:
    """Raise a `ConfigError` if no prompt can be made, as with more examples than there are."""
    num = arguments.num_fewshot
    if num is not None and task.get_config("num_fewshot") != 0:  # as lm_eval does
        task.set_config(key="num_fewshot", value=num)
    task.set_fewshot_seed(seed=arguments.seeds[3])
    num = task.get_config("num_fewshot") or 0
    try:
        task.build_all_requests(limit=1)
    except Exception as error:  # whatever its code raises
        if not num:
            raise ConfigError(
                f"eeh_args.tasks: no prompt of the task {name!r} can be made "
                f"({_first_line(error)}). Correct its YAML file."
            ) from error
        raise ConfigError(
            f"eeh_args.num_fewshot: no prompt of the task {name!r} can be made with {num} "
            f"examples ({_first_line(error)}). Set num_fewshot to fewer than it has documents for "
            f"examples, or correct its YAML file."
        ) from error


def _first_line(error: Exception) -> str:
    return reason_of(error).strip().splitlines()[0]


def _commit() -> str | None:
    """Return the commit of the current folder, if it is a repository."""
    found: str | None = import_module("lm_eval.loggers.utils").get_commit_from_path(os.getcwd())
    return found


class _Forward(logging.Handler):
    """Passes the messages of `lm_eval` to the log of the run, but for those on its own settings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a message."""
        if not str(record.msg).startswith(_OF_SETTINGS):
            log.log(record.levelno, "lm_eval: %s", record.getMessage())


@contextmanager
def messages_in_log(level: str) -> Iterator[None]:
    """Write messages of `lm_eval` to the log of the run inside; no progress bars, nothing of git.

    `level`: the least level that is written.
    """
    task_module: Any = import_module("lm_eval.api.task")
    theirs = logging.getLogger("lm_eval")
    before = theirs.level, theirs.propagate, theirs.handlers
    theirs.setLevel(level.upper())
    theirs.propagate, theirs.handlers = False, [_Forward()]
    bars = getattr(task_module, "tqdm", None)  # they would break the progress of the run
    task_module.tqdm = lambda items, **options: items
    evaluator: Any = import_module("lm_eval.evaluator")
    commit = evaluator.get_git_commit_hash  # it runs git, which complains outside a repository
    evaluator.get_git_commit_hash = _commit
    try:
        yield
    finally:
        task_module.tqdm = bars
        evaluator.get_git_commit_hash = commit
        theirs.setLevel(before[0])
        theirs.propagate, theirs.handlers = before[1], before[2]
