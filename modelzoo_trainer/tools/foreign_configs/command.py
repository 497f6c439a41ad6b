"""The command: `modelzoo-trainer config convert FILE [-o OUT]`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.base.exit_codes import DONE, FAILED
from modelzoo_trainer.base.stderr import say
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.foreign_configs.conversion import LIBRARIES, convert_file

_SUMMARY: Final = "Convert configurations of other libraries to the format of this package"
_EPILOG: Final = """\
examples:
{examples}

exit codes:
  0    converted; what has no counterpart is listed on standard error and in the file
  1    with --strict: converted, but a key that has an effect has no exact counterpart;
       or the file cannot be written
  2    the command or the file is invalid
"""
_EXAMPLES: Final = (
    "convert theirs.yaml -o params.yaml",
    "convert theirs.yaml --steps-per-epoch 1234 --strict -o params.yaml",
)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `config`. `prog`: the name of the program, with the command."""
    text = "convert a training file of another library: {}".format(", ".join(LIBRARIES))
    epilog = _EPILOG.format(examples="\n".join(f"  {prog} {one}" for one in _EXAMPLES))
    shape: Any = {
        "epilog": epilog,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    whole = argparse.ArgumentParser(prog=prog, description=f"{_SUMMARY}.", **shape)
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser("convert", help=text, description=f"C{text[1:]}.", **shape)
    _add_arguments(command)
    return whole


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the YAML file to convert")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help="the file to write (default: standard output); an existing one is not overwritten",
    )
    parser.add_argument(
        "--from",
        dest="library",
        choices=[*LIBRARIES],
        help="the library of the file (default: found by its keys)",
    )
    parser.add_argument(
        "--steps-per-epoch",
        "--steps_per_epoch",
        type=_positive,
        metavar="N",
        help="optimizer steps of an epoch (samples / global batch size), for lengths in epochs "
        "that must be written in steps, as for schedules",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if a key that has an effect has no exact counterpart",
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT if it exists")


def run(options: argparse.Namespace) -> tuple[int, str | None]:
    """Convert the file; return the exit code, and the text for standard output, if any.

    Raises:
        ConfigError: If the file is invalid, or OUT exists.
        OSError: If OUT cannot be written.
    """
    output: Path | None = options.output
    if output is not None and output.exists() and not options.force:
        raise ConfigError(f"{output} exists. Name another file with -o, or add --force.")
    text, findings = convert_file(
        options.file, library=options.library, steps_per_epoch=options.steps_per_epoch
    )
    if output is not None:
        output.write_text(text, encoding="utf-8")
    for line in findings.lines():
        say(line)
    if output is not None:
        say(f"Wrote {output}. Check it with: modelzoo-trainer check {output}")
    code = FAILED if options.strict and not findings.is_complete else DONE
    return code, text if output is None else None


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
