"""Parse the command line: sub-commands, or options without one."""

from __future__ import annotations

import argparse
import io
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Final

from modelzoo_trainer import __version__
from modelzoo_trainer.cli import harness
from modelzoo_trainer.cli.suggestions import CLUSTER_OPTIONS, suggest_command, suggest_option
from modelzoo_trainer.config.modes import DEFAULT_MODE, MODES
from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.errors import ConfigError

PROG: Final = "modelzoo-trainer"

_RUNS: Final = {method: mode for mode, method in MODES.items()}  # the last mode of each
_RUNS[harness.NAME] = _RUNS["validate_all"]
_SUMMARIES: Final = {
    "fit": "train, and validate as often as the file asks for",
    "validate": "validate a model or a checkpoint once",
    "validate_all": "validate several checkpoints, each on all validation data",
    "test": "evaluate a checkpoint on the test data",
    "predict": "compute and save the outputs of a model",
    "lm_eval": "evaluate a language model on tasks of lm_eval, by EleutherEvalHarness in the file",
    "launch": "train in many processes: here, by Slurm, Ray, Kubernetes or SkyPilot",
    "check": "check a file and list what would run; builds and writes nothing",
    "plan": "estimate memory, communication and FLOPs of training, without devices or data",
    "schema": "print the JSON Schema of the files, for editors",
    "checkpoint": "list, show, verify, compare, export, convert or delete checkpoints",
    "config": "convert configurations of llm-foundry and torchtune to the format of this package",
    "report": "write an HTML report with the curves of one or several runs",
    "data_preprocess": "convert text or datasets to HDF5 rows of tokens",
}
_OTHERS: Final = (
    *("launch", "check", "plan", "schema", "checkpoint", "config", "report", "data_preprocess"),
)
COMMANDS: Final = (*_RUNS, *_OTHERS)
"""All sub-commands, in the order of the help."""

_EXAMPLES: Final = {
    "": (
        "fit configs/quickstart.yaml",
        "fit params.yaml --device gpu --max_steps 1000 --set init.seed=7",
        "validate params.yaml --checkpoint_path runs/a/checkpoint_500",
        "check params.yaml",
        "checkpoint list runs/a",
        "config convert theirs.yaml -o params.yaml",
        "report runs/a runs/b -o report.html",
    ),
    "fit": (
        "fit params.yaml",
        "fit params.yaml --num_epochs 3 --model_dir runs/a",
        "fit params.yaml --set init.optimizer.AdamW.lr=3e-4",
    ),
    "validate": (
        "validate params.yaml",
        "validate params.yaml --checkpoint_path runs/a/checkpoint_500 --eval_steps 100",
    ),
    "validate_all": (
        "validate_all params.yaml",
        "validate_all params.yaml --checkpoint_path 'runs/a/checkpoint_*'",
    ),
    "lm_eval": (
        "lm_eval params.yaml --tasks hellaswag,arc_easy --num_fewshot 5",
        "lm_eval params.yaml --checkpoint_path 'runs/a/checkpoint_*' --limit 100",
    ),
    "launch": (
        "launch --on local --processes-per-node 8 params.yaml --device gpu",
        "launch --on slurm --nodes 4 --processes-per-node 8 params.yaml --max_steps 1000",
        "launch --on ray --nodes 4 --processes-per-node 8 params.yaml --dry-run",
    ),
    "check": ("check params.yaml", "check params.yaml --mode eval --explain-hooks"),
    "plan": ("plan params.yaml --world-size 64 --memory 80GiB",),
    "schema": ("schema > schema.json", "schema --import my_models > schema.json"),
    "report": ("report runs/a", "report runs/a runs/b -o report.html", "report runs/a --watch"),
    "data_preprocess": ("data_preprocess data.yaml", "data_preprocess run --config data.yaml"),
}
_USAGE: Final = {
    "launch": "--on LAUNCHER [options] FILE [options of fit]",
    "report": "RUN_DIR... [options]",
    "schema": "[options]",
}
_ALIASES: Final = {"device": ("--target_device",), "model_dir": ("-o",)}
_SUPERVISED: Final = "--supervised"
_EXIT_CODES: Final = """\
exit codes:
  0    success
  1    the run failed
  2    the command or the file is invalid
  130  stopped by Ctrl-C (SIGINT)
  143  stopped by SIGTERM, SIGUSR1, a stop file or loop.max_time

Training that is stopped saves a checkpoint if it can; run the same command again to resume. With
init.autorestart.max_num_restarts in the file, a run that fails is restarted automatically."""

_CHECK_CODES: Final = """\
exit codes:
  0    the file runs here
  2    the command or the file is invalid, or the file cannot run here: the last line names what
       is missing, such as data, a class or a checkpoint"""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; `action` is "run", "compile", "check", "plan" or "schema".

    Prints and exits where the command is invalid or asks for help.

    Args:
        words: The command line after the program's name.
    """
    if not words or words[0].startswith("-"):
        return _parse_options(words)
    name = words[0]
    if name not in COMMANDS:
        parser = _parser_without_command()
        parser.error(f"unknown command {name!r}. {suggest_command(name, COMMANDS)}")
    parser = command_parser(name)
    if name in _RUNS:
        _add_run_arguments(parser, name)
    else:
        _ADD[name](parser)
    options = _parse_known(parser, words[1:], command=name)
    if name == harness.NAME:
        harness.add_changes(options)
    if options.validate_only:
        options.action = "check"
    elif options.compile_only:
        options.action = "compile"
    options.mode = options.mode or options.default_mode
    return options


def parse_run(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line that runs a file.

    Raises:
        ConfigError: If one is invalid.
    """
    message = io.StringIO()
    try:
        with redirect_stderr(message):
            return parse(words)
    except SystemExit:
        raise ConfigError(message.getvalue().strip().rpartition("error: ")[2]) from None


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a sub-command, as yet without arguments."""
    usage = _USAGE.get(name, "FILE [options]")
    summary = _SUMMARIES.get(name, f"run the {name} section of a file")
    parser = argparse.ArgumentParser(
        prog=f"{PROG} {name}",
        usage=f"{PROG} {name} {usage}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_epilog(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(
        action="run",
        compile_only=False,
        default_mode=None,
        explain_hooks=False,
        ignored=(),
        mode=None,
        modules=[],
        params=None,
        python_paths=[],
        restrict=None,
        supervised=None,
        validate_only=False,
    )
    return parser


def _epilog(name: str) -> str:
    examples = _EXAMPLES.get(name, (f"{name} params.yaml",))
    lines = "\n".join(f"  {PROG} {example}" for example in examples)
    codes = _CHECK_CODES if name == "check" else _EXIT_CODES if name in _RUNS or not name else ""
    return "\n\n".join(part for part in (f"examples:\n{lines}", codes) if part)


def _parse_known(
    parser: argparse.ArgumentParser, words: Sequence[str], *, command: str | None
) -> argparse.Namespace:
    options, unknown = parser.parse_known_args(words)
    if unknown:
        known = [option.name for option in OPTIONS]
        advice = suggest_option(unknown[0], known, command=command)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
    return options


# ---- arguments of the sub-commands


def _add_run_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.set_defaults(default_mode=_RUNS[name])
    _add_file(parser)
    modes = [mode for mode, method in MODES.items() if method == name]
    if len(modes) > 1:
        _add_mode(parser, modes, _RUNS[name])
    _add_import(parser)
    _add_compile_only(parser)
    parser.add_argument(
        "--validate_only",
        action="store_true",
        help=f"check the file, as `{PROG} check` does, and run nothing",
    )
    parser.add_argument(
        "--python_paths",
        metavar="DIR",
        nargs="*",
        default=[],
        help="folders in which to look for modules that the file or --import names",
    )
    parser.add_argument(_SUPERVISED, help=argparse.SUPPRESS)  # for a supervisor to give
    if name == harness.NAME:
        harness.add_options(parser)
        parser.set_defaults(restrict=harness.restrict)
    _add_cluster_options(parser)
    _add_overrides(parser)


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(f"--{name}" for name in CLUSTER_OPTIONS)
    group = parser.add_argument_group(
        "accepted for compatibility with Cerebras' cszoo, no effect",
        textwrap.fill(names, 76, break_on_hyphens=False),
    )
    for option, num in CLUSTER_OPTIONS.items():
        group.add_argument(
            f"--{option}",
            dest="ignored",
            action=_Ignore,
            nargs=None if num == 1 else num,
            help=argparse.SUPPRESS,
        )


class _Ignore(argparse.Action):
    """Collect the names of options that have no effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored = (*namespace.ignored, option_string)


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="check")
    _add_file(parser)
    _add_mode(parser, MODES, None)
    _add_explain_hooks(parser)
    _add_import(parser)
    _add_overrides(parser)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="plan", default_mode=DEFAULT_MODE)
    _add_file(parser)
    _add_sizes(parser)
    _add_import(parser)
    _add_overrides(parser)


def _add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(action="schema")
    _add_import(parser)


_ADD: Final = {
    "check": _add_check_arguments,
    "plan": _add_plan_arguments,
    "schema": _add_schema_arguments,
}


# ---- without a sub-command


def _parse_options(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser_without_command()
    options = _parse_known(parser, words, command=None)
    if options.params is None and not options.schema:
        parser.error(
            "neither a command nor a file is given; write a command, such as fit FILE, or pass a "
            "file with -p/--params"
        )
    sizes = options.world_size, options.memory, options.devices
    if not options.plan and (options.use_data or any(one is not None for one in sizes)):
        parser.error(
            "--world-size, --memory, --devices and --data require --plan; to train with several "
            "processes, use torchrun"
        )
    options.action = _action(options)
    if options.mode is None and options.action != "check":
        options.mode = DEFAULT_MODE
    return options


def _action(options: argparse.Namespace) -> str:
    asked = {
        "plan": options.plan,
        "compile": options.compile_only,
        "schema": options.schema,
        "check": options.check or options.explain_hooks,
    }
    return next((action for action, is_asked in asked.items() if is_asked), "run")


def _parser_without_command() -> argparse.ArgumentParser:
    commands = "\n".join(
        f"  {name:16} {_SUMMARIES.get(name, f'run the {name} section of a file')}"
        for name in COMMANDS
    )
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} COMMAND ...\n       {PROG} --params FILE [--mode MODE] [options]",
        description="Train, validate and inspect what a YAML file describes.\n\n"
        f"commands (`{PROG} COMMAND --help` describes each):\n{commands}",
        epilog=_epilog(""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(ignored=(), python_paths=[], restrict=None)
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    group = parser.add_argument_group("options without a command")
    group.add_argument("-p", "--params", type=Path, metavar="FILE", help="the YAML file")
    _add_mode(group, MODES, DEFAULT_MODE)
    group.add_argument(
        "--check", action="store_true", help=f"as `{PROG} check`: check the file, run nothing"
    )
    _add_explain_hooks(group)
    _add_compile_only(group)
    group.add_argument(
        "--plan", action="store_true", help=f"as `{PROG} plan`: estimate what training takes"
    )
    _add_sizes(group)
    group.add_argument(
        "--schema", action="store_true", help=f"as `{PROG} schema`: print the JSON Schema"
    )
    _add_import(group)
    group.add_argument(_SUPERVISED, help=argparse.SUPPRESS)  # for a supervisor to give
    _add_overrides(parser)
    return parser


# ---- arguments of several commands

_Arguments = argparse._ActionsContainer  # a parser or a group


def _add_file(parser: _Arguments) -> None:
    parser.add_argument("params", type=Path, metavar="FILE", help="the YAML file")


def _add_mode(parser: _Arguments, modes: Iterable[str], default: str | None) -> None:
    said = f"(default: {default})" if default else "(default: the first that the file describes)"
    parser.add_argument(
        "-m", "--mode", metavar="MODE", choices=[*modes], help=f"{', '.join(modes)} {said}"
    )


def _add_explain_hooks(parser: _Arguments) -> None:
    parser.add_argument(
        "--explain-hooks",
        action="store_true",
        help="check, and list the callbacks that each hook calls, in order",
    )


def _add_compile_only(parser: _Arguments) -> None:
    parser.add_argument(
        *("--compile-only", "--compile_only"),
        action="store_true",
        help="run a few steps of training and validation to compile their graphs; writes nothing "
        "but the cache: with backend.cache_dir in the file, the next run finds them",
    )


def _add_sizes(parser: _Arguments) -> None:
    parser.add_argument(
        *("--world-size", "--world_size"),
        metavar="N",
        help="number of processes to plan for (default: 1)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of the device of each process, such as 80GiB; if the run does not fit, print "
        "settings that do and exit with 1",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        help="with --memory: search the smallest setting that fits on at most N devices: mesh, "
        "micro-batch and recomputation",
    )
    parser.add_argument(
        "--data",
        dest="use_data",
        action="store_true",
        help="take the shapes of a batch from the data, instead of from the settings of the data "
        "processor",
    )


def _add_import(parser: _Arguments) -> None:
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="module whose classes the file may name without their path: installed, beside the "
        "file or in the working directory; may be repeated",
    )


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    overrides = parser.add_argument_group("override settings of the file")
    overrides.add_argument(
        "--set",
        dest="changes",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="set a value, such as init.loop.max_steps=10 or "
        "init.callbacks[KeepNCheckpoints].n=3; may be repeated",
    )
    for option in OPTIONS:
        names = [f"--{option.name}", *_ALIASES.get(option.name, ())]
        if option.metavar is None:
            overrides.add_argument(*names, action="store_const", const="true", help=option.help)
        else:
            overrides.add_argument(
                *names, dest=option.name, metavar=option.metavar, help=option.help
            )
