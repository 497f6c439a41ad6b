"""Standard error without a reader, full, closed, or missing."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from modelzoo_trainer.base import stderr

posix = pytest.mark.skipif(os.name != "posix", reason="needs descriptors to wait for")


@posix
def test_a_reader_who_is_gone_is_not_waited_for(stuck_pipe) -> None:
    stderr.write("a line\n" * 10_000, stuck_pipe, patience_s=0.01)  # or this never ends


@posix
def test_a_line_reaches_its_reader_whole() -> None:
    reader, writer = os.pipe()
    stderr.write("\u00e4" * 5_000, writer, patience_s=0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        assert file.read() == "\u00e4" * 5_000


def test_a_line_is_written_where_tests_and_programs_expect_it(capfd) -> None:
    stderr.say("a line")
    assert capfd.readouterr().err == "a line\n"


def test_a_stream_without_a_descriptor_gets_it_too(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    stderr.say("a line")
    assert stream.getvalue() == "a line\n"


@posix
@pytest.mark.parametrize("what", ["none", "closed", "full"])
def test_what_cannot_be_written_is_dropped(monkeypatch, tmp_path, what) -> None:
    stream = None
    if what != "none":
        path = tmp_path / "closed" if what == "closed" else "/dev/full"
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115
    if what == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    stderr.say("a line")
    if what == "full":
        stream.close()


@posix
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_whose_standard_streams_are_closed_gets_empty_ones(tmp_path, closed) -> None:
    path = tmp_path / "said"
    program = f"""
import os, sys
from modelzoo_trainer.base.stderr import open_missing_streams
open_missing_streams()
print("hello", file=sys.stderr, flush=True)
with open({str(path)!r}, "w") as file:
    numbers = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]
    file.write(f"{{numbers}} {{file.fileno() > 2}} {{all(map(os.get_inheritable, numbers))}}")
"""
    command = f'exec "$0" -c "$1" {closed}'
    subprocess.run(["bash", "-c", command, sys.executable, program], check=True)
    assert path.read_text() == "[0, 1, 2] True True"
