"""What a supervisor reads of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.supervisor.protocol import LaunchSpec, without_launch_spec
from modelzoo_trainer.tools.supervisor.settings import SupervisorSettings, read_settings

ONE = "trainer: {{init: {{model_dir: out, autorestart: {section}}}}}\n"
TWO = """\
trainer:
- trainer: {init: {model_dir: a, autorestart: {max_num_restarts: 2}}}
- trainer: {init: {model_dir: b}}
"""


@pytest.fixture
def read(tmp_path):
    def of(text, *changes, mode="train_and_eval", **options):
        path = tmp_path / "params.yaml"
        path.write_text(text)
        return read_settings(path, mode=mode, changes=changes, options=options)

    return of


def test_a_file_that_asks_for_restarts_has_settings(read):
    section = "{max_num_restarts: 3, hang_timeout: 5, startup_timeout: 7.5}"
    assert read(ONE.format(section=section)) == [
        SupervisorSettings(
            model_dir=Path("out"), max_num_restarts=3, hang_timeout=5, startup_timeout=7.5
        )
    ]


def test_options_and_changes_of_the_command_line_count(read):
    text = ONE.format(section="{max_num_restarts: 3}")
    [made] = read(text, "init.autorestart.max_num_restarts=1", model_dir="other")
    assert (made.max_num_restarts, made.model_dir) == (1, Path("other"))
    assert read(text, "init.autorestart=null") == []
    [made] = read("trainer: {init: {}}", "init.autorestart={max_num_restarts: 4}")
    assert (made.max_num_restarts, made.model_dir) == (4, Path("model_dir"))


@pytest.mark.parametrize(
    "section",
    [
        "null",
        "{}",
        "3",
        "[]",
        "{max_num_restarts: null}",
        "{max_num_restarts: 0}",
        "{max_num_restarts: -1}",
        "{max_num_restarts: true}",
        "{max_num_restarts: '3'}",
        "{max_num_restarts: 3, hang_timeout: 0}",
        "{max_num_restarts: 3, startup_timeout: soon}",
    ],
)
def test_what_asks_for_none_or_is_wrong_has_none(read, section):
    assert read(ONE.format(section=section)) == []


@pytest.mark.parametrize(
    "text", ["autorestart: [", "autorestart", "trainer: {autorestart: 1}", "- autorestart", ""]
)
def test_a_file_that_is_wrong_is_left_to_who_runs_it(read, tmp_path, text):
    assert read(text) == []
    assert read_settings(tmp_path / "none", mode=None, changes=["autorestart"], options={}) == []


def test_a_change_that_is_wrong_is_left_to_who_runs_it(read):
    assert read(ONE.format(section="{max_num_restarts: 3}"), "init.loop") == []


def test_a_file_without_an_end_is_not_read_whole():
    assert read_settings(Path("/dev/zero"), mode="train", changes=[], options={}) == []


def test_what_comes_through_a_pipe_is_left_to_who_runs_it(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, b"trainer: {init: {autorestart: {max_num_restarts: 2}}}")
    os.close(writer)
    path = Path(f"/dev/fd/{reader}")
    assert read_settings(path, mode="train", changes=[], options={}) == []
    assert os.read(reader, 10) == b"trainer: {"
    os.close(reader)


def test_trainers_of_a_list_ask_all_or_none(read):
    with pytest.raises(ConfigError, match=r"1 of the 2 trainers, .*trainer\[1\].*autorestart"):
        read(TWO)
    made = read(TWO, "trainer[1].init.autorestart={max_num_restarts: 5}")
    assert [(str(one.model_dir), one.max_num_restarts) for one in made] == [("a", 2), ("b", 5)]
    assert read(TWO, "trainer[0].init.autorestart=null") == []


def test_the_limits_of_the_supervisor_are_longer_than_those_of_the_watchdog():
    plain = SupervisorSettings(model_dir=Path(), max_num_restarts=1)
    assert (plain.beat_timeout_s, plain.startup_timeout_s) == (300, 1800)
    quick = SupervisorSettings(
        model_dir=Path(), max_num_restarts=1, hang_timeout=10, startup_timeout=20
    )
    assert (quick.beat_timeout_s, quick.startup_timeout_s) == (31, 31)


SPEC = LaunchSpec(folder="/f", attempt=2, supervisor=os.getpid(), descriptor=3, trainer=1)


def test_a_launch_spec_is_read_as_it_was_written():
    option, text = SPEC.to_words()
    assert option == "--supervised"
    assert LaunchSpec.parse(text) == SPEC
    assert (SPEC.report, SPEC.stacks) == (Path("/f/attempt_2.json"), Path("/f/stacks_2.txt"))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "1", "{", SPEC.to_words()[1].replace("2", "-2"), '{"folder": "x", "a": 1}'],
)
def test_what_no_supervisor_wrote_is_refused(text):
    with pytest.raises(ValueError, match="--supervised"):
        LaunchSpec.parse(text)


def test_the_command_is_shown_without_the_launch_spec():
    words = ["run.py", "-p", "x.yaml"]
    assert without_launch_spec([*words, *SPEC.to_words()]) == words
    assert without_launch_spec(words) == words
