"""What would make a run fit into the memory that there is; tried on paper as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.planning.amounts import in_bytes
from modelzoo_trainer.planning.figures import Figures

Try = Callable[[list[str]], Figures]

_CHECKPOINTING: Final = "init.backend.activation_checkpointing=full"
_SHARD: Final = "init.backend.parallel={shard: -1}"
_META: Final = "init.backend.sharding.meta_init=true"


def advice(figures: Figures, memory: int, attempt: Try) -> tuple[bool, str]:
    """Return whether a run fits, and what to say of that.

    Args:
        figures: Of the run as it is.
        memory: Bytes that a process has.
        attempt: Returns the figures with changes of the file, as for `--set`.
    """
    need = figures.peak_bytes
    if need <= memory:
        left = in_bytes(memory - need)
        return True, f"It fits: {in_bytes(need)} of {in_bytes(memory)}, {left} are left."
    lines = [_why(figures, memory)]
    for changes in _candidates(figures):
        words = " ".join(f"--set '{change}'" for change in changes)
        try:
            found = attempt(changes)
        except ConfigError as error:
            lines.append(f"  {words}: cannot be used: {str(error).splitlines()[0]}")
            continue
        fits = found.peak_bytes <= memory
        lines.append(f"  {words}: {in_bytes(found.peak_bytes)}, {_verdict(fits)}")
        if fits:
            return False, "\n".join(lines)
    lines.append("  Smaller batches, more processes or a smaller model are left.")
    return False, "\n".join(lines)


def _verdict(fits: bool) -> str:
    return "which fits." if fits else "which is still too much."


def _why(figures: Figures, memory: int) -> str:
    is_built = figures.building.total > figures.training.total
    peak = figures.building if is_built else figures.training
    kind, size = peak.parts.most_common(1)[0]
    when = "while the model is built" if is_built else "while training"
    most = "" if is_built else f", most of it {kind.value} ({in_bytes(size)})"
    return (
        f"It does not fit: {in_bytes(peak.total)} {when}{most}, and a process has "
        f"{in_bytes(memory)}. Tried on paper:"
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
