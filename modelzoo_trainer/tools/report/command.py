"""The command: `modelzoo-trainer report RUN_DIR... [-o report.html] [--watch [PORT]]`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.exit_codes import DONE, INTERRUPTED, WRONG_USE
from modelzoo_trainer.base.stderr import say
from modelzoo_trainer.checkpointing.stores.urls import is_url
from modelzoo_trainer.errors import ConfigError, StoreError
from modelzoo_trainer.tools.checkpoints.overview import readable
from modelzoo_trainer.tools.checkpoints.store_arguments import local_path
from modelzoo_trainer.tools.report.metric_names import short_names
from modelzoo_trainer.tools.report.output import check_target, write_report
from modelzoo_trainer.tools.report.page import page_and_notes, plotly_js
from modelzoo_trainer.tools.report.run import ReportedRun, read_run

MAX_RUNS: Final = 20
DEFAULT_OUTPUT: Final = "report.html"
DEFAULT_PORT: Final = 8765
_PROG: Final = "python -m modelzoo_trainer.tools.report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=_run,
        metavar="RUN_DIR",
        help=f"the model_dir of a run that had a JsonlLogger (the default with a YAML file), or a "
        f"file of metrics with one JSON object per line; the curves of up to {MAX_RUNS} runs are "
        f"overlaid, and their settings compared",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the file to write (default: {DEFAULT_OUTPUT} in the working directory, not in the "
        f"folder of the run); a file that is not a report is not overwritten",
    )
    parser.add_argument(
        "--watch",
        type=_port,
        nargs="?",
        const=DEFAULT_PORT,
        metavar="PORT",
        help=f"serve the report on 127.0.0.1 instead (default port: {DEFAULT_PORT}; 0 = any free "
        f"port) and keep it current until Ctrl-C; with -o, also write the file",
    )


def run(options: argparse.Namespace) -> int:
    """Write or serve a report, and return the exit code."""
    try:
        options.runs = [local_path(one, siblings=True) for one in options.runs]
        if options.watch is not None:
            from modelzoo_trainer.tools.report.watching import serve

            serve(options.runs, options.watch, options.output)
            return DONE
        output = Path(options.output or DEFAULT_OUTPUT)
        check_target(output)
        plotly_js()  # before reading, which may take minutes
        runs = read_runs(options.runs)
        html, notes = page_and_notes(runs)
        write_report(output, html)
    except (ConfigError, StoreError) as error:
        say(str(error))
        return WRONG_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    for note in notes:
        say(note)
    size = readable(output.stat().st_size)
    say(f"Wrote {os.path.abspath(output)} ({size}, {_count(runs)}).")
    return DONE


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read runs, without duplicates, with the shortest distinct names.

    Raises:
        ConfigError: If there are too many, or a path is not a run.
    """
    unique = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]
    if len(unique) > MAX_RUNS:
        raise ConfigError(
            f"got {len(unique)} runs; a report shows at most {MAX_RUNS}. Pass fewer runs."
        )
    found, problems = [], []
    for path, name in zip(unique, short_names(unique), strict=True):
        try:
            found.append(read_run(path, name))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _count(runs: Sequence[ReportedRun]) -> str:
    num = sum(len(one.values) for run in runs for one in run.metrics.series.values())
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}, {num} values"


def _run(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; pass a number from 0 to 65535")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Show runs in one HTML file that works offline.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))
