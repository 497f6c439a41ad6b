"""Find the smallest mesh that a run fits on: `plan FILE --devices 64 --memory 80GiB`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import log2
from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer.base.devices import fake_world
from modelzoo_trainer.errors import ConfigError, in_bytes
from modelzoo_trainer.tools.planning.figures import Figures, in_thousands, table
from modelzoo_trainer.tools.planning.measure import Built, facts_of, measure
from modelzoo_trainer.tools.planning.meshes import (
    Choice,
    choices,
    device_numbers,
    guess,
    multiples_of_divisors,
    of_model,
)
from modelzoo_trainer.tools.planning.second_process import LoadPlans, second_process

if TYPE_CHECKING:
    from modelzoo_trainer.config.plan import TrainerPlan

Attempt = Callable[[Choice], Figures]

_HALF: Final = ("bfloat16", "cbfloat16", "bf16")
_SAME_KIND: Final = 0.97  # of a guess may be needed in truth
_OTHER_CONTEXT: Final = 0.95  # of the activations and the like
_OTHER_KIND: Final = 0.75
_GROWING: Final = 0.25  # of the activations grows with the micro-batch, at least
_MOST: Final = 24  # measurements


@dataclass(slots=True)
class Smallest:
    """The result of a search.

    Args:
        choice: The smallest setting that fits, or the one that needs least.
        figures: What it needs.
        fits: Whether it fits.
        num_measured: How many settings were measured.
        refused: Why others could not be measured.
    """

    choice: Choice
    figures: Figures
    fits: bool
    num_measured: int
    refused: Sequence[str] = ()


@dataclass(slots=True)
class _Search:
    """Choices that were measured, and guesses of others.

    Args:
        attempt: Returns the figures of a choice.
        memory: Bytes of a device.
        can_split_positions: Whether the model has sequence parallelism.
    """

    attempt: Attempt
    memory: int
    can_split_positions: bool = False
    known: list[tuple[Choice, Figures]] = field(default_factory=list)
    refused: list[tuple[Choice, str]] = field(default_factory=list)  # and why
    split: float = 1.0  # the part of the parameters that `tensor` splits, such as not the experts

    def measure(self, choice: Choice) -> Figures | None:
        """Return the figures of a choice; None if the model or the data refuse it."""
        for known, figures in self.known:
            if known == choice:
                return figures
        try:
            figures = self.attempt(choice)
        except ConfigError as error:
            self.refused.append((choice, str(error)))
            return None
        self.known.append((choice, figures))
        if choice.mesh.tensor > 1:
            self.split = choice.mesh.split(figures.num_params_here / figures.num_params)
        return figures

    def may_fit(self, choice: Choice) -> bool:
        """Return whether a choice may fit, by what is known of others.

        Of each kind of choices, the one with the smallest micro-batch is measured first.
        """
        if self._is_refused(choice) or self._is_second(choice):
            return False
        if len(self.known) >= _MOST:
            return False
        if self.known and self._least(choice) > self.memory:
            return False
        if not self._same_kind(choice):
            smallest = replace(choice, micro_batch=1)
            least = self._least_by_others(smallest), self._least_by_others(choice, _GROWING)
            if max(least) > self.memory or self.measure(smallest) is None:
                return False
        known = min(self._same_kind(choice), key=lambda one: _distance(one[0], choice))
        return guess(choice, *known, split=self.split) * _SAME_KIND <= self.memory

    def _least(self, choice: Choice) -> float:
        """Return what the model alone needs."""
        return of_model(choice, *self.known[0], self.split) * _SAME_KIND

    def _least_by_others(self, choice: Choice, part: float = 1.0) -> float:
        """Return what a choice needs at least, by what is known of other kinds.

        `part`: of the activations that grows with the micro-batch.
        """
        alike = [one for one in self.known if one[0].recomputation == choice.recomputation]
        if not alike:
            return 0.0
        nearest, figures = min(alike, key=lambda one: _other_axes(one[0], choice))
        layers = nearest.mesh.tensor, nearest.splits_positions
        is_split_more = nearest.mesh.context <= choice.mesh.context
        is_same = layers == (choice.mesh.tensor, choice.splits_positions) and is_split_more
        factor = part * (_OTHER_CONTEXT if is_same else _OTHER_KIND)
        return guess(choice, nearest, figures, split=self.split, factor=factor)

    def smallest(self, tries: Iterable[Mapping[int, Sequence[Choice]]]) -> Smallest:
        """Return the first choice that fits.

        Args:
            tries: By the number of devices, choices with the best one first. The next numbers are
                tried where nothing fits.

        Raises:
            ConfigError: If no choice can be measured.
        """
        for by_number in tries:
            self._probe(by_number)
            for choice in chain(*by_number.values()):
                figures = self.measure(choice) if self.may_fit(choice) else None
                if figures is not None and figures.peak_bytes <= self.memory:
                    return Smallest(choice, figures, True, len(self.known))
        if not self.known:
            raise ConfigError(self.refused[0][1])
        nearest, figures = min(self.known, key=lambda one: one[1].peak_bytes)
        refused = tuple({reason: None for _, reason in self.refused})
        return Smallest(nearest, figures, False, len(self.known), refused)

    def _probe(self, by_number: Mapping[int, Sequence[Choice]]) -> None:
        """Measure one sample at a time on the most devices, to know the size of the model."""
        for choices_of_most in reversed([*by_number.values()]):
            for choice in choices_of_most:
                if choice.kind == (None, 1, 1, False) and choice.micro_batch == 1:
                    self.measure(choice)
                    return

    def _is_refused(self, choice: Choice) -> bool:
        split = choice.splits_positions
        meshes = [one.mesh for one, _ in self.refused if one.splits_positions in (split, False)]
        if any(one.mesh.shard > 1 for one, _ in self.known):  # another axis was refused
            meshes = [replace(mesh, shard=1) for mesh in meshes]
        return any(choice.mesh.splits_all_of(mesh) for mesh in meshes)

    def _is_second(self, choice: Choice) -> bool:
        """Return whether the same choice with split positions, which needs less, is possible."""
        if choice.mesh.tensor == 1 or choice.splits_positions or not self.can_split_positions:
            return False
        return not self._is_refused(replace(choice, splits_positions=True))

    def _same_kind(self, choice: Choice) -> list[tuple[Choice, Figures]]:
        return [one for one in self.known if one[0].kind == choice.kind]


def _other_axes(known: Choice, choice: Choice) -> tuple[float, float]:
    """Order what is known of other kinds: how layers are split matters more than how rows are."""
    one, two = known.mesh, choice.mesh
    return abs(log2(one.tensor / two.tensor)), abs(log2(one.context / two.context))


def _distance(known: Choice, choice: Choice) -> tuple[int, float]:
    """Order what is known: guesses from smaller micro-batches are not too small."""
    return known.micro_batch, abs(known.mesh.num_devices - choice.mesh.num_devices)


def search(
    load: LoadPlans, index: int, devices: int, memory: int, *, use_data: bool = False
) -> Smallest:
    """Return the smallest setting of a file's trainer that fits.

    The fewest devices come first, then the setting that makes a step least slower (`Choice.cost`).
    A few settings are measured; guesses from them tell which others may fit, and one that is
    chosen has been measured.

    Args:
        load: Returns the plans of the file, with further changes as for `--set`. If it can be
            pickled, a second process measures at the same time.
        index: Which of them.
        devices: The largest number of devices.
        memory: Bytes of each.
        use_data: As of `measure`.

    Raises:
        ConfigError: If no setting can be measured.
    """
    with _measuring(load, index, use_data=use_data) as attempt:
        plan = load(Choice.alone().changes())[index]
        with fake_world(1):
            samples, can_split = facts_of(plan, use_data=use_data)
        state = _Search(attempt, memory, can_split)
        sharding = _sharding(plan)

        def choices_of(number: int) -> list[Choice]:
            found = choices(
                number,
                samples.num,
                is_global=samples.is_global,
                sharding=sharding,
                can_split_positions=can_split,
            )
            return sorted(found, key=lambda one: one.cost)

        tries = [device_numbers(devices)]
        if samples.is_global:  # processes divide the batch, such as 55 samples
            tries.append(multiples_of_divisors(samples.num, devices))
        return state.smallest({one: choices_of(one) for one in numbers} for numbers in tries)


@contextmanager
def _measuring(load: LoadPlans, index: int, *, use_data: bool) -> Iterator[Attempt]:
    """Yield a function that measures a choice, on two cores where that is possible."""
    built = Built()  # no choice changes the model
    with second_process(load, index, use_data=use_data) as second:

        def attempt(choice: Choice) -> Figures:
            longer = None if second is None else second.ask(choice)
            with fake_world(choice.mesh.num_devices):
                own = load(choice.changes())[index]
                return measure(own, use_data=use_data, one_step=True, built=built, longer=longer)

        yield attempt


def _sharding(plan: TrainerPlan) -> tuple[tuple[str, Any], ...]:
    """Return the value of `sharding`: built after it is sharded, and used in half precision."""
    precision = plan.init.get("precision")  # None = float32
    given = {"enabled": False} if precision is None else precision.arguments
    is_half = given.get("enabled") is not False and str(given.get("fp16_type", _HALF[0])) in _HALF
    found: dict[str, Any] = {"meta_init": True}
    if is_half:
        found |= {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    return tuple(found.items())


def report(found: Smallest, devices: int, memory: int) -> str:
    """Return the text of a result."""
    choice, figures = found.choice, found.figures
    need, limit = in_bytes(figures.peak_bytes), in_bytes(memory)
    num, samples = choice.mesh.num_devices, figures.num_samples * figures.num_data_shards
    if found.fits:
        lines = [
            f"The smallest setting that fits has {num} of {devices} devices: {need} of {limit} on "
            f"each, {in_thousands(figures.flops, 'FLOP')} of each per step of {samples} samples."
        ]
    else:
        lines = [
            f"Nothing fits on {devices} devices with {limit}. The setting that comes nearest needs "
            f"{need} on each of {num}. Use more devices, a smaller batch_size or a smaller model."
        ]
        lines += [f"Not possible: {reason}" for reason in found.refused]
    words = " ".join(f"--set '{change}'" for change in choice.changes())
    lines += ["", choice.yaml(), "", f"Or on the command line: {words}", "", table(figures)]
    return "\n".join(lines)
