"""Checks of constructor arguments that a type annotation cannot express."""

from modelzoo_trainer.errors import ConfigError


def require_positive(**sizes: float) -> None:
    """Check that every size is at least 1.

    Raises:
        ConfigError: For the first that is not.
    """
    for argument, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{argument} is {size}; it must be at least 1.")


def require_rates(**rates: float) -> None:
    """Check that every dropout rate is at least 0 and below 1.

    Raises:
        ConfigError: For the first that is not.
    """
    for argument, rate in rates.items():
        if not 0 <= rate < 1:
            raise ConfigError(f"{argument} is {rate}; it must be at least 0 and below 1.")
