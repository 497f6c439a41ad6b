"""The seat of sparse training."""

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.errors import ConfigError


class Sparsity(CoreCallback):
    """Masks on the weights; this version has none, and refuses to be asked for them.

    Args:
        sparsity: None.

    Raises:
        ConfigError: If anything else is given.
    """

    def __init__(self, sparsity: object = None) -> None:
        if sparsity is not None:
            raise ConfigError(
                f"sparsity is {sparsity!r}, but sparse training is not part of this version. "
                f"Leave it out."
            )
