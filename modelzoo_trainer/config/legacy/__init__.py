"""Files of the older layout, as the format had it before `trainer`."""

from modelzoo_trainer.config.legacy.conversion import convert_legacy, is_legacy

__all__ = ["convert_legacy", "is_legacy"]
