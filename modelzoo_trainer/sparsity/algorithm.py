"""What all sparsity algorithms have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from typing import ClassVar

from torch import Tensor

from modelzoo_trainer.constraints import checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.sparsity.curves import Curve, Schedule
from modelzoo_trainer.sparsity.init_methods import InitMethod, Layout
from modelzoo_trainer.sparsity.selection import Filter
from modelzoo_trainer.sparsity.updates import Updates


class SparsityAlgorithm(ABC):
    """Decides how many weights of a parameter are zero, and which.

    How many, and when that changes, follows from the step alone, on the host; which, is computed
    on the device, in shapes that depend on no value. An algorithm has no state.

    Args:
        fraction: Of the weights of each parameter that are zero.
        updates: When masks change; None = never.
        init_method: Which weights are there in the beginning: "random", "topk" (of the greatest
            magnitude), "from_zeros" (those that are not zero, whatever their number) or
            "checkerboard" (evenly spread).
        param_filter: A glob over names of parameters, or several; None = every trainable one with
            two dimensions or more, except those of embeddings.
        layout: How weights are divided into groups with the same fraction.

    Raises:
        ConfigError: If an argument does not fit.
    """

    needs_gradients: ClassVar[bool] = False
    """Whether updates look at gradients, those of weights that are zero included."""

    @checked()
    def __init__(
        self,
        *,
        fraction: Curve,
        updates: Updates | None,
        init_method: InitMethod,
        param_filter: Filter | None,
        layout: Layout | None = None,
    ) -> None:
        globs = [param_filter] if isinstance(param_filter, str) else param_filter
        self.fraction = fraction
        self.updates = updates
        self.init_method = init_method
        self.param_filter = None if globs is None else tuple(globs)
        self.layout = layout or Layout()

    def leaves(self) -> list[SparsityAlgorithm]:
        """Return the algorithms that have parameters of their own."""
        return [self]

    def described(self) -> str:
        """Return class and settings as text, without which parameters are meant."""
        return described(self, without="param_filter")

    def is_due(self, step: int) -> bool:
        """Return whether masks change in the step that begins at `global_step` = `step`."""
        return self.updates is not None and self.updates.is_due(step)

    def fraction_at(self, step: int) -> float:
        """Return the fraction of zeros that holds once a step's update is done, in [0, 1]."""
        return limited(self.fraction.value(*self.last_update(step)))

    def num_kept(self, step: int, size: int) -> int:
        """Return how many weights are there once a step's update is done."""
        return size - round(self.fraction_at(step) * size)

    def num_surviving(self, step: int, size: int) -> int:
        """Return how many of these an update leaves in place, before it grows others."""
        return self.num_kept(step, size)

    def numbers(self, step: int, size: int, seed: int, name: str) -> list[int]:
        """Return what a mask is computed from.

        `size` is the number of weights of a group.

        Returns:
            How many weights survive, how many there are then, and a key of two words for what is
            drawn at random.
        """
        digest = blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
        keys = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")
        return [self.num_surviving(step, size), self.num_kept(step, size), *keys]

    @abstractmethod
    def new_mask(
        self, weights: Tensor, mask: Tensor, gradients: Tensor | None, numbers: Sequence[Tensor]
    ) -> Tensor:
        """Return which weights are there after an update.

        Args:
            weights: (groups, weights of a group).
            mask: Which are there now, of the same shape, bool.
            gradients: Of the same shape; None unless `needs_gradients`.
            numbers: Numbers of survivors and of weights, each (), and the key, (2,); int64.

        Cost: No host read.
        """

    def last_update(self, step: int) -> tuple[int, int]:
        """Return the step and number of the last update up to `step`; (0, 0) if there was none."""
        return (0, 0) if self.updates is None else self.updates.last(step)


def described(thing: object, without: str = "") -> str:
    """Return a value, or what a class of this package keeps, as text that is equal for equals.

    `thing`: plain, an algorithm, a curve or updates; of others the class alone.
    """
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return repr(thing)
    if isinstance(thing, (list, tuple)):
        return f"[{', '.join(map(described, thing))}]"
    kind = type(thing)
    if not isinstance(thing, (SparsityAlgorithm, Curve, Updates, Layout)):
        return kind.__name__
    names = getattr(kind, "__slots__", None) or vars(thing)
    kept = {name.removeprefix("_"): getattr(thing, name) for name in names if name != without}
    inner = ", ".join(f"{name}={described(value)}" for name, value in kept.items())
    return f"{kind.__name__}({inner})"


def limited(fraction: float) -> float:
    """Return what of a curve's value counts, in [0, 1]."""
    return min(max(fraction, 0.0), 1.0)


def one_of(schedule: Schedule | None, sparsity: Schedule | None, name: str) -> Schedule:
    """Return the one that is given of two names of one argument.

    Raises:
        ConfigError: If both are given, or none.
    """
    if schedule is not None and sparsity is not None:
        raise ConfigError(f"{name}: sparsity and schedule are both given; they exclude each other.")
    given = sparsity if schedule is None else schedule
    if given is None:
        raise ConfigError(f"{name}.sparsity is missing; write sparsity or schedule.")
    return given
