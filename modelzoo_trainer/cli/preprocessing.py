"""The command: `modelzoo-trainer data_preprocess FILE`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from modelzoo_trainer.base.exit_codes import DONE
from modelzoo_trainer.config.preprocessing import read_settings
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from modelzoo_trainer.zoo.rows.preprocessing.summary import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("params", type=Path, metavar="FILE", nargs="?", help="the YAML file")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the same, as cszoo has it")


def run(path: Path, say: Callable[[str], None]) -> int:
    """Preprocess what a file describes, and report what was written.

    Raises:
        ConfigError: If the file or the input is invalid.
    """
    log = logging.getLogger("modelzoo_trainer.preprocessing")
    handler = _Lines(say)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        settings, notes = read_settings(path)
        for note in notes:
            say(note)
        say(report(preprocess(settings)))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return DONE


class _Lines(logging.Handler):
    """Writes each record as a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())
