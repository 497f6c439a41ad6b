"""Convert files of the older layout, which has no `trainer`."""

from modelzoo_trainer.config.legacy.conversion import convert_legacy, is_legacy

__all__ = ["convert_legacy", "is_legacy"]
