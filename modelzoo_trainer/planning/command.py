"""The command: `python run.py --params FILE --plan --world-size N --memory 80GiB`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelzoo_trainer.devices import BackendError, processes_on_paper
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.planning.advice import advice
from modelzoo_trainer.planning.amounts import bytes_of
from modelzoo_trainer.planning.measure import measure
from modelzoo_trainer.planning.table import table

if TYPE_CHECKING:
    from modelzoo_trainer.config.plan import TrainerPlan
    from modelzoo_trainer.planning.figures import Figures

LoadPlans = Callable[[list[str]], "Sequence[TrainerPlan]"]


def plan_on_paper(
    load: LoadPlans, world_size: str | None = None, memory: str | None = None
) -> tuple[bool, str]:
    """Return whether a file's trainers fit, and the tables of what they would take.

    Args:
        load: Returns the plans of the file, with further changes as for `--set`.
        world_size: How many processes; None = 1.
        memory: Of each process's device, such as "80GiB"; None = not asked for.

    Raises:
        ConfigError: If an argument is no good, or the processes do not fit the file.
    """
    num = _number(world_size)
    limit = None if memory is None else bytes_of(memory)
    try:
        with processes_on_paper(num):
            return _all_of(load, limit)
    except BackendError as error:
        raise ConfigError(str(error)) from None


def _all_of(load: LoadPlans, limit: int | None) -> tuple[bool, str]:
    texts, all_fit = [], True
    for index, plan in enumerate(load([])):
        figures = measure(plan)
        texts.append(table(figures))
        if limit is not None:

            def attempt(changes: list[str], index: int = index) -> Figures:
                return measure(load(changes)[index])

            fits, text = advice(figures, limit, attempt)
            texts.append(text)
            all_fit = all_fit and fits
    return all_fit, "\n\n".join(texts)


def _number(world_size: str | None) -> int:
    if world_size is None:
        return 1
    if not (world_size.isascii() and world_size.isdecimal()) or int(world_size) < 1:
        raise ConfigError(
            f"--world-size is {world_size!r}; it must be a number of processes >= 1, such as 8."
        )
    return int(world_size)
