"""The output of `check`: components, length, schedules, notes, hooks and verdict of a plan."""

from modelzoo_trainer.config.report.hooks import hook_order
from modelzoo_trainer.config.report.run import report
from modelzoo_trainer.config.report.verdict import lacks_of, verdict

__all__ = ["hook_order", "lacks_of", "report", "verdict"]
