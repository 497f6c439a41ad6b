"""The help of each command."""

from __future__ import annotations

import re
import shlex

import pytest

from modelzoo_trainer.cli import checkpoints as checkpoint_commands
from modelzoo_trainer.cli import parser
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.modes import MODES
from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.tools.foreign_configs.command import parser as config_parser

CHECKPOINT = (*checkpoint_commands._EXAMPLES, "convert")
RUNS = tuple(dict.fromkeys(MODES.values()))
PARSED = (*RUNS, "lm_eval", "check", "plan", "schema")
ALL = (
    *("", *PARSED, "config", "config convert", "checkpoint"),
    *(f"checkpoint {name}" for name in CHECKPOINT),
)


@pytest.fixture
def helped(capsys, monkeypatch):
    """Return a function from a command to its help."""
    monkeypatch.setenv("COLUMNS", "100")

    def of(command):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--help"])
        assert ended.value.code == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return of


def options_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.partition("\nexamples:")[0]))


def examples_in(text):
    lines = text.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines()
    return [shlex.split(line.strip()) for line in lines]


@pytest.mark.parametrize("command", ALL)
def test_help_names_the_program_and_fits_a_terminal(helped, command):
    text = helped(command)
    program = " ".join(["modelzoo-trainer", *command.split()])
    assert text.startswith(f"usage: {program}")
    assert "--supervised" not in text
    assert text.isascii()
    examples = examples_in(text)
    assert examples
    assert all(words[: len(program.split())] == program.split() for words in examples)
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_help_lists_every_command_and_the_checkpoint_help_its_own(helped):
    listed = re.findall(r"^  (\w+)  +\S", helped(""), flags=re.MULTILINE)
    assert listed[: len(parser.COMMANDS)] == list(parser.COMMANDS)
    assert set(MODES.values()) < set(listed)
    for name in CHECKPOINT:
        assert re.search(rf"^    {name} +\S", helped("checkpoint"), flags=re.MULTILINE)


@pytest.mark.parametrize("command", ["", *RUNS, "check", "plan"])
def test_every_override_is_in_the_help_of_a_command_that_reads_a_file(helped, command):
    found = options_in(helped(command))
    assert {"--set", "--import", "--target_device"} < found
    assert {f"--{option.name}" for option in OPTIONS} < found


@pytest.mark.parametrize(
    ("command", "own", "others"),
    [
        ("", {"--params", "--mode", "--version", "--plan", "--schema", "--check"}, {"--num_csx"}),
        ("fit", {"--mode", "--compile-only", "--validate_only", "--num_csx"}, {"--params"}),
        ("validate", {"--python_paths", "--mount_dirs"}, {"--mode", "--check", "--memory"}),
        ("check", {"--mode", "--explain-hooks"}, {"--compile-only", "--memory"}),
        ("plan", {"--world-size", "--memory"}, {"--mode", "--explain-hooks"}),
        ("schema", {"--import"}, {"--set", "--device"}),
        ("checkpoint diff", {"--key"}, {"--verify"}),
        ("checkpoint delete", {"--yes"}, {"--force"}),
    ],
)
def test_a_command_has_its_own_options_only(helped, command, own, others):
    found = options_in(helped(command))
    assert own <= found
    assert not others & found


@pytest.mark.parametrize("command", ["", *RUNS])
def test_the_help_of_a_run_lists_modes_and_exit_codes(helped, command):
    text = helped(command)
    assert re.findall(r"^  (\d+) +\S", text, flags=re.MULTILINE) == ["0", "1", "2", "130", "143"]
    if command in ("", "fit"):
        modes = [mode for mode, method in MODES.items() if command in ("", method)]
        assert ", ".join(modes) in " ".join(text.split())


@pytest.mark.parametrize("command", ["", *PARSED])
def test_the_examples_of_the_help_are_valid(helped, command):
    for _, *words in examples_in(helped(command)):
        if words[0] == "checkpoint":
            checkpoint_commands._parser().parse_args(words[1:])
        elif words[0] == "config":
            config_parser("x").parse_args(words[1:])
        elif words[0] != "report":  # which has arguments of its own
            until = words.index(">") if ">" in words else len(words)
            assert parser.parse(words[:until]).action in ("run", words[0])


@pytest.mark.parametrize("command", CHECKPOINT)
def test_the_examples_of_checkpoint_commands_are_valid(helped, command):
    for words in examples_in(helped(f"checkpoint {command}")):
        checkpoint_commands._parser().parse_args(words[2:])
