"""The command line: options, one run after another, several processes, signals, exit codes."""

from modelzoo_trainer.cli.command import main as main
