"""The output of `check`: components, length, schedules, notes, hooks and verdict of a plan."""

from modelzoo_trainer.config.printout.hooks import hook_order
from modelzoo_trainer.config.printout.run import report
from modelzoo_trainer.config.printout.verdict import lacks_of, runs_here, verdict

__all__ = ["hook_order", "lacks_of", "report", "runs_here", "verdict"]
