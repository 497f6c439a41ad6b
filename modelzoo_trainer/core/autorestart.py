"""The seat of automatic restarts."""

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.errors import ConfigError


class AutoRestart(CoreCallback):
    """Restarts of a run that failed; this version has none, and refuses to be asked for them.

    Args:
        max_num_restarts: None or 0 = none.
        min_num_csx: Accepted for the format's sake; without meaning on this hardware.

    Raises:
        ConfigError: If restarts are asked for.
    """

    def __init__(self, max_num_restarts: int | None = None, min_num_csx: int = 1) -> None:
        if max_num_restarts is not None and max_num_restarts < 0:
            raise ConfigError(
                f"autorestart.max_num_restarts is {max_num_restarts}; it must be >= 0 or null."
            )
        if max_num_restarts:
            raise ConfigError(
                f"autorestart.max_num_restarts is {max_num_restarts}, but automatic restarts are "
                f"not part of this version. Set it to null and start the command again after a "
                f"failure: it resumes from the newest checkpoint."
            )

    enabled = False
