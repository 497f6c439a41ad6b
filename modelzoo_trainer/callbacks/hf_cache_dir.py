"""Where Hugging Face's libraries keep what they download."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from modelzoo_trainer.callback import Callback
from modelzoo_trainer.devices import hold_hf_cache_dir, loaded_hf_libraries
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer")


class HFCacheDir(Callback):
    """Has Hugging Face's libraries use a folder for models and data, until the trainer is closed.

    The environment of this process and of those that it starts says so from before the model is
    built. A library that was imported earlier has read it already; that is logged.

    Args:
        cache_dir: The folder; `~` is the user's. It need not be there.

    Raises:
        ConfigError: If it is empty, or is a file.
    """

    def __init__(self, cache_dir: str) -> None:
        if not isinstance(cache_dir, str) or not cache_dir:
            raise ConfigError(f"HFCacheDir.cache_dir is {cache_dir!r}; it must name a folder.")
        self.cache_dir = Path(cache_dir).expanduser().absolute()
        if self.cache_dir.is_file():
            raise ConfigError(
                f"HFCacheDir.cache_dir is {cache_dir!r}, which is a file; it must name a folder."
            )
        self._let_go: Callable[[], None] | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        loaded = loaded_hf_libraries()
        if loaded and trainer.backend.is_main:
            log.warning(
                "HFCacheDir: %s had been imported already and may go on with another folder than "
                "%s.",
                ", ".join(loaded),
                self.cache_dir,
            )
        self.finalize()
        self._let_go = hold_hf_cache_dir(str(self.cache_dir))

    @override
    def finalize(self) -> None:
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()
