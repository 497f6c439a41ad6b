"""The command: `python run.py --params FILE --plan --world-size N --memory 80GiB`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from modelzoo_trainer.base.devices import BackendError, fake_world
from modelzoo_trainer.errors import ConfigError, in_bytes
from modelzoo_trainer.tools.planning.figures import Figures, bytes_of, table
from modelzoo_trainer.tools.planning.measure import measure
from modelzoo_trainer.tools.planning.meshes import Choice
from modelzoo_trainer.tools.planning.search import report, search
from modelzoo_trainer.tools.planning.second_process import LoadPlans

Try = Callable[[list[str]], Figures]

_CHECKPOINTING: Final = "init.backend.activation_checkpointing=full"
_SHARD: Final = "init.backend.parallel={shard: -1}"
_META: Final = "init.backend.sharding.meta_init=true"


def advice(figures: Figures, memory: int, attempt: Try) -> tuple[bool, str]:
    """Return whether a run fits, and the text of the verdict.

    `attempt`: returns the figures after changes of the file, as for `--set`.
    """
    need = figures.peak_bytes
    if need <= memory:
        left = in_bytes(memory - need)
        return True, f"It fits: {in_bytes(need)} of {in_bytes(memory)}, {left} free."
    lines = [_why(figures, memory)]
    for changes in _candidates(figures):
        words = " ".join(f"--set '{change}'" for change in changes)
        try:
            found = attempt(changes)
        except ConfigError as error:
            lines.append(f"  {words}: invalid: {str(error).splitlines()[0]}")
            continue
        fits = found.peak_bytes <= memory
        lines.append(f"  {words}: {in_bytes(found.peak_bytes)}, {_verdict(fits)}")
        if fits:
            return False, "\n".join(lines)
    lines.append("  Use smaller batches, more processes or a smaller model.")
    return False, "\n".join(lines)


def _verdict(fits: bool) -> str:
    return "fits." if fits else "still does not fit."


def _why(figures: Figures, memory: int) -> str:
    is_built = figures.building.total > figures.training.total
    peak = figures.building if is_built else figures.training
    kind, size = peak.parts.most_common(1)[0]
    when = "while the model is built" if is_built else "while training"
    most = "" if is_built else f", most of it {kind.value} ({in_bytes(size)})"
    return (
        f"It does not fit: {in_bytes(peak.total)} {when}{most}, and a process has "
        f"{in_bytes(memory)}. Tried:"
    )


def _candidates(figures: Figures) -> Iterator[list[str]]:
    """Yield changes to try: one at a time, then together."""
    shards = figures.world_size > 1 and figures.axes.get("shard") == 1
    if shards:
        yield [_SHARD]
    yield [_CHECKPOINTING]
    if shards:
        yield [_SHARD, _CHECKPOINTING]
    if figures.world_size > 1:
        sharding = [_SHARD] if shards else []
        yield [*sharding, _META]
        yield [*sharding, _META, _CHECKPOINTING]


def plan_on_paper(
    load: LoadPlans,
    world_size: str | None = None,
    memory: str | None = None,
    *,
    devices: str | None = None,
    use_data: bool = False,
) -> tuple[bool, str]:
    """Return whether a file's trainers fit, and the tables of what they would need.

    `load`: returns the plans of the file, with further changes as for `--set`. `world_size`:
    number of processes; None = 1. `memory`: of each process's device, such as "80GiB"; None =
    not checked. `devices`: the largest number of devices, among which the smallest setting that
    fits is searched; None = `world_size` processes as the file has them. `use_data`: as of
    `measure`.

    Raises:
        ConfigError: If an argument is invalid, or the processes do not fit the file.
    """
    if world_size is not None and devices is not None:
        raise ConfigError(
            "--world-size plans a number of processes as the file has them, and --devices searches "
            "a setting on at most that many. Remove one of them."
        )
    num = _number(world_size, "--world-size")
    limit = None if memory is None else bytes_of(memory)
    try:
        if devices is not None:
            return _search_all(load, _number(devices, "--devices"), limit, use_data=use_data)
        with fake_world(num):
            return _all_of(load, limit, use_data=use_data)
    except BackendError as error:
        raise ConfigError(str(error)) from None


def _all_of(load: LoadPlans, limit: int | None, *, use_data: bool) -> tuple[bool, str]:
    texts, all_fit = [], True
    plans = load([])
    for index, plan in enumerate(plans):
        figures = measure(plan, use_data=use_data)
        texts += [*_title(index, len(plans)), table(figures)]
        if limit is not None:

            def attempt(changes: list[str], index: int = index) -> Figures:
                return measure(load(changes)[index], use_data=use_data)

            fits, text = advice(figures, limit, attempt)
            texts.append(text)
            all_fit = all_fit and fits
    return all_fit, "\n\n".join(texts)


def _search_all(
    load: LoadPlans, devices: int, limit: int | None, *, use_data: bool
) -> tuple[bool, str]:
    if limit is None:
        raise ConfigError(
            "--devices searches a setting that fits, which requires --memory, such as "
            "--memory 80GiB. To plan the file as it is, use --world-size."
        )
    texts, all_fit = [], True
    num = len(load(Choice.alone().changes()))
    for index in range(num):
        found = search(load, index, devices, limit, use_data=use_data)
        texts += [*_title(index, num), report(found, devices, limit)]
        all_fit = all_fit and found.fits
    return all_fit, "\n\n".join(texts)


def _title(index: int, num: int) -> list[str]:
    return [f"Trainer {index + 1} of {num}"] if num > 1 else []


def _number(given: str | None, option: str) -> int:
    if given is None:
        return 1
    if not (given.isascii() and given.isdecimal()) or int(given) < 1:
        raise ConfigError(
            f"{option}: expected an integer >= 1, got {given!r}. Example: {option} 8."
        )
    return int(given)
