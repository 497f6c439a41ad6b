"""Restart settings of a configuration file, read without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.core.parts.watchdog import STARTUP_TIMEOUT_S
from modelzoo_trainer.errors import ConfigError

_WORD: Final = "autorestart"
_BEAT_TIMEOUT_S: Final = 300.0
_MODEL_DIR: Final = "model_dir"  # the trainer's default


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """The supervisor's settings for one trainer."""

    model_dir: Path
    max_num_restarts: int  # most restarts in a row without progress, > 0
    hang_timeout: float | None = None  # of `AutoRestart`
    startup_timeout: float | None = None  # of `AutoRestart`

    @property
    def beat_timeout_s(self) -> float:
        """Seconds without a heartbeat after which a child is killed.

        Longer than the child's own watchdog: another library may hold the GIL.
        """
        return _BEAT_TIMEOUT_S if self.hang_timeout is None else 3 * self.hang_timeout + 1

    @property
    def startup_timeout_s(self) -> float:
        """Likewise at start-up."""
        own = STARTUP_TIMEOUT_S if self.startup_timeout is None else self.startup_timeout
        return max(own, self.beat_timeout_s)


def read_settings(
    path: Path,
    *,
    mode: str | None,
    changes: Sequence[str],
    options: Mapping[str, str | None],
) -> list[SupervisorSettings]:
    """Return the settings of each trainer of a file; empty if restarts are not enabled.

    Empty for an invalid file too: the run itself reports what is invalid.

    `changes`: as for `--set`.

    Raises:
        ConfigError: If only some trainers of a list enable restarts.
    """
    if not _is_mentioned(path, changes):
        return []
    try:
        plain = _read(path, mode, changes, options)
    except ConfigError:
        return []
    trainer = plain.get("trainer") if isinstance(plain, dict) else None
    items = trainer if isinstance(trainer, list) else [plain]
    found = [_settings_of(item) for item in items]
    asking = [one for one in found if one is not None]
    if asking and len(asking) < len(found):
        without = found.index(None)
        raise ConfigError(
            f"{path}: restarts are enabled for {len(asking)} of the {len(found)} trainers, but not "
            f"for trainer[{without}]. Set init.autorestart.max_num_restarts to an integer > 0 for "
            f"all trainers, or for none."
        )
    return asking


def _is_mentioned(path: Path, changes: Sequence[str]) -> bool:
    """Return whether the file may enable restarts, without parsing it as YAML."""
    from modelzoo_trainer.config.loader import MAX_BYTES

    try:
        if not path.is_file():  # a pipe can be read only once
            return False
        if any(_WORD in change for change in changes):
            return True
        with path.open("rb") as file:
            return _WORD.encode() in file.read(MAX_BYTES)
    except OSError:
        return False


def _read(
    path: Path, mode: str | None, changes: Sequence[str], options: Mapping[str, str | None]
) -> Any:
    from modelzoo_trainer.config.legacy import convert_legacy, is_legacy
    from modelzoo_trainer.config.loader import read_file
    from modelzoo_trainer.config.overrides import apply_overrides, changes_of, parse_override
    from modelzoo_trainer.config.positions import Problems, to_plain

    root = read_file(path)
    if is_legacy(root):
        root = convert_legacy(root, Problems())
    overrides = [parse_override(change) for change in changes]
    return to_plain(apply_overrides(root, [*changes_of(options, mode, root), *overrides]))


def _settings_of(item: Any) -> SupervisorSettings | None:
    """Return one trainer's settings; None = not enabled or invalid."""
    init = _get(_get(item, "trainer"), "init")
    section = _get(init, _WORD)
    num = _get(section, "max_num_restarts")
    hang, startup = _get(section, "hang_timeout"), _get(section, "startup_timeout")
    if type(num) is not int or num < 1 or not (_is_limit(hang) and _is_limit(startup)):
        return None
    return SupervisorSettings(
        model_dir=_folder_of(_get(init, "model_dir"), _get(init, "object_store")),
        max_num_restarts=num,
        hang_timeout=hang,
        startup_timeout=startup,
    )


def _folder_of(model_dir: Any, object_store: Any) -> Path:
    """Return the folder of a run; of a URL, its local copy."""
    from modelzoo_trainer.checkpointing.stores.mirror import resolve

    if not isinstance(model_dir, str) or not model_dir:
        return Path(_MODEL_DIR)
    cache, options = _get(object_store, "cache_dir"), _get(object_store, "options")
    return Path(
        resolve(
            model_dir,
            "model_dir",
            cache_dir=cache if isinstance(cache, str) else None,
            options=options if isinstance(options, dict) else None,
        )
    )


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _is_limit(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and value > 0)
