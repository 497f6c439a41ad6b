"""Values on their way to the host: captured now, delivered later, in order."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

Values: TypeAlias = list[Any]  # a number for each 0-d tensor, a CPU tensor for each other
Deliver: TypeAlias = Callable[[Values], None]


def host_value(tensor: Tensor) -> Any:
    """Return a CPU tensor's content: a number if it has no dimensions, else a copy."""
    return tensor.item() if tensor.dim() == 0 else tensor.detach().clone()


class Reads(ABC):
    """The queue of a backend's deferred reads.

    What is read during a step is one group: it is shipped to the host at the end of the step, and
    delivered when `lag` more steps have ended; always then, so that a run does not depend on
    how busy the device is.

    Args:
        lag: Steps between a read and its delivery, >= 0.
    """

    is_empty: bool
    """Whether nothing is open or under way."""

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag
        self.is_empty = True
        self._open: list[tuple[Any, Deliver]] = []
        self._shipped: deque[tuple[Any, list[Deliver]]] = deque()
        self._delivering = False

    @abstractmethod
    def capture(self, tensors: Sequence[Tensor]) -> Any:
        """Return a copy of the tensors' values as they are now, without waiting."""

    @abstractmethod
    def ship(self, captured: list[Any]) -> Any:
        """Start one transfer of all that a step captured; return a handle for `land`."""

    @abstractmethod
    def land(self, shipped: Any) -> list[Values]:
        """Return the values of a transfer, one list a capture; may wait for the device."""

    def put(self, tensors: Sequence[Tensor], deliver: Deliver) -> None:
        """Add a read to the open group.

        Args:
            tensors: What to read; may be changed afterwards.
            deliver: Called with the values.
        """
        self._open.append((self.capture(tensors), deliver))
        self.is_empty = False

    def end_group(self) -> None:
        """End a step's group and deliver what is `lag` groups old."""
        captured = [item for item, _ in self._open]
        delivers = [deliver for _, deliver in self._open]
        self._open = []
        self._shipped.append((self.ship(captured) if captured else None, delivers))
        self._deliver(self.lag)

    def flush(self) -> None:
        """Deliver everything, also what deliveries read."""
        while True:
            if self._open:
                self.end_group()
            self._deliver(0)
            if self._delivering or not self._open:
                return

    def clear(self) -> None:
        """Forget what was read and not delivered."""
        self._open = []
        self._shipped.clear()
        self.is_empty = True

    def _deliver(self, keep: int) -> None:
        if self._delivering:  # a delivery that reads: the outer call goes on with it
            return
        self._delivering = True
        try:
            while len(self._shipped) > keep:
                shipped, delivers = self._shipped.popleft()
                if delivers:
                    self._hand_over(shipped, delivers)
        finally:
            self._delivering = False
            self.is_empty = not self._open and not self._shipped

    def _hand_over(self, shipped: Any, delivers: list[Deliver]) -> None:
        landed = shipped.values if isinstance(shipped, Landed) else self.land(shipped)
        pending = deque(zip(delivers, landed, strict=True))
        while pending:
            deliver, values = pending.popleft()
            try:
                deliver(values)
            except BaseException:
                # The rest is delivered by the next flush, so that nothing is lost.
                if pending:
                    rest = Landed([values for _, values in pending])
                    self._shipped.appendleft((rest, [deliver for deliver, _ in pending]))
                raise


class Landed:
    """Values that are on the host already."""

    def __init__(self, values: list[Values]) -> None:
        self.values = values


class HostReads(Reads):
    """Reads of a device that is the host: the values are there at once."""

    def capture(self, tensors: Sequence[Tensor]) -> Values:
        """Return the values."""
        return [host_value(tensor) for tensor in tensors]

    def ship(self, captured: list[Values]) -> list[Values]:
        """Return what was captured."""
        return captured

    def land(self, shipped: list[Values]) -> list[Values]:
        """Return what was captured."""
        return shipped
