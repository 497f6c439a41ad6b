"""Watch when torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable

from torch._dynamo.callback import CallbackArgs, callback_handler


class CompileWatch:
    """Counts compilations: of forward and backward passes, and recordings of CUDA graphs.

    Args:
        on_start: Called when one starts, perhaps in a thread of torch.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self.num_started = 0
        self._on_start = on_start
        callback_handler.register_start_callback(self._note)

    def close(self) -> None:
        """Stop watching."""
        callback_handler.remove_start_callback(self._note)

    def _note(self, _: CallbackArgs) -> None:
        self.num_started += 1
        self._on_start()
