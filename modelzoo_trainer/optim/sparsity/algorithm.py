"""Base class of sparsity algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b
from typing import ClassVar

from torch import Tensor

from modelzoo_trainer.base.constraints import checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.sparsity.curves import Curve, Schedule
from modelzoo_trainer.optim.sparsity.init_methods import InitMethod, RankingGroups
from modelzoo_trainer.optim.sparsity.selection import Filter
from modelzoo_trainer.optim.sparsity.updates import Updates


class SparsityAlgorithm(ABC):
    """Decide how many weights of a parameter are zero, and which.

    The number, and the steps of updates, depend on the step only and are computed on the host; the
    mask is computed on the device, in shapes that do not depend on values. An algorithm has no
    state.

    Args:
        fraction: Fraction of zero weights in each parameter.
        updates: When masks change; None = never.
        init_method: Which weights are nonzero initially: "random", "topk" (the largest
            magnitude), "from_zeros" (those that are nonzero, regardless of the fraction) or
            "checkerboard" (evenly spread).
        param_filter: One or more globs of parameter names; None = all trainable parameters with two
            or more dimensions, except embeddings.
        layout: How weights are divided into groups with the same fraction.

    Raises:
        ConfigError: If an argument is invalid.
    """

    needs_gradients: ClassVar[bool] = False
    """Whether updates use gradients, including gradients of zero weights."""

    @checked()
    def __init__(
        self,
        *,
        fraction: Curve,
        updates: Updates | None,
        init_method: InitMethod,
        param_filter: Filter | None,
        layout: RankingGroups | None = None,
    ) -> None:
        globs = [param_filter] if isinstance(param_filter, str) else param_filter
        self.fraction = fraction
        self.updates = updates
        self.init_method = init_method
        self.param_filter = None if globs is None else tuple(globs)
        self.layout = layout or RankingGroups()

    def leaves(self) -> list[SparsityAlgorithm]:
        """Return the algorithms that apply to parameters themselves."""
        return [self]

    def described(self) -> str:
        """Return class and settings as text, without the parameters."""
        return described(self, without="param_filter")

    def is_due(self, step: int) -> bool:
        """Return whether masks change in the step that begins at `global_step` = `step`."""
        return self.updates is not None and self.updates.is_due(step)

    def fraction_at(self, step: int) -> float:
        """Return the fraction of zeros after a step's update, in [0, 1]."""
        return limited(self.fraction.value(*self.last_update(step)))

    def num_kept(self, step: int, size: int) -> int:
        """Return the number of nonzero weights after a step's update."""
        return size - round(self.fraction_at(step) * size)

    def num_surviving(self, step: int, size: int) -> int:
        """Return how many nonzero weights an update keeps, before it grows others."""
        return self.num_kept(step, size)

    def numbers(self, step: int, size: int, seed: int, name: str) -> list[int]:
        """Return the numbers that a mask is computed from.

        `size` is the number of weights in a group.

        Returns:
            The number of weights that survive, the number of nonzero weights afterwards, and a
            random key of two integers.
        """
        digest = blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
        keys = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")
        return [self.num_surviving(step, size), self.num_kept(step, size), *keys]

    @abstractmethod
    def new_mask(
        self, weights: Tensor, mask: Tensor, gradients: Tensor | None, numbers: Sequence[Tensor]
    ) -> Tensor:
        """Return which weights are nonzero after an update.

        Args:
            weights: (groups, weights in a group).
            mask: Which weights are nonzero now, same shape, bool.
            gradients: Same shape; None unless `needs_gradients`.
            numbers: Numbers of survivors and of nonzero weights, each (), and the key, (2,); int64.

        Cost: No host read.
        """

    def last_update(self, step: int) -> tuple[int, int]:
        """Return the step and number of the last update up to `step`; (0, 0) if there was none."""
        return (0, 0) if self.updates is None else self.updates.last(step)


def described(thing: object, without: str = "") -> str:
    """Format a value or an object of this package as text that is equal for equal objects.

    `thing`: a plain value, an algorithm, a curve or updates; otherwise only its class is shown.
    """
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return repr(thing)
    if isinstance(thing, (list, tuple)):
        return f"[{', '.join(map(described, thing))}]"
    kind = type(thing)
    if not isinstance(thing, (SparsityAlgorithm, Curve, Updates, RankingGroups)):
        return kind.__name__
    names = getattr(kind, "__slots__", None) or vars(thing)
    kept = {name.removeprefix("_"): getattr(thing, name) for name in names if name != without}
    inner = ", ".join(f"{name}={described(value)}" for name, value in kept.items())
    return f"{kind.__name__}({inner})"


def limited(fraction: float) -> float:
    """Clamp a curve's value to [0, 1]."""
    return min(max(fraction, 0.0), 1.0)


def one_of(schedule: Schedule | None, sparsity: Schedule | None, name: str) -> Schedule:
    """Return the argument that is given under either of its two names.

    Raises:
        ConfigError: If both are given, or none.
    """
    if schedule is not None and sparsity is not None:
        raise ConfigError(
            f"{name}: sparsity and schedule are both given; they are aliases. Keep one."
        )
    given = sparsity if schedule is None else schedule
    if given is None:
        raise ConfigError(f"{name}.sparsity is missing; give sparsity or schedule.")
    return given
