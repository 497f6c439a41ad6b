"""The command line: commands, options, distributed runs, signals, exit codes."""

from modelzoo_trainer.cli.command import main as main
