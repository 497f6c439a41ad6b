"""The output of `check`: components, length, schedules, notes and hooks of a plan."""

from modelzoo_trainer.config.report.hooks import hook_order
from modelzoo_trainer.config.report.run import report

__all__ = ["hook_order", "report"]
