"""What `--check` prints of a plan: components, length, schedules, notes, hooks."""

from modelzoo_trainer.config.report.hooks import hook_order
from modelzoo_trainer.config.report.run import report

__all__ = ["hook_order", "report"]
