"""Blocks of a page are found, run and compared as their markers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(blocks: Any, tmp_path: Path) -> Any:
    """Return a function that runs a page with a text."""

    def run_text(text: str) -> Any:
        page = tmp_path / "page.md"
        page.write_text(text, encoding="utf-8")
        return blocks.run_page(page)

    return run_text


def python(code: str, marker: str = "") -> str:
    return f"{marker}\n```python\n{code}\n```\n\n"


def output(text: str) -> str:
    return f"<!-- output -->\n```text\n{text}\n```\n\n"


def test_blocks_are_found_with_language_marker_and_text(blocks):
    text = "x\n<!-- file: a/b.py -->\n```python\na = 1\n```\n\n* y\n\n  ```\n  b\n  ```\n"
    first, second = blocks.blocks_of(text)
    assert (first.line, first.end, first.language) == (3, 5, "python")
    assert (first.name, first.value, first.text) == ("file", "a/b.py", "a = 1\n")
    assert (second.language, second.marker, second.text) == ("", "", "b\n")


def test_the_lowest_comment_that_is_known_counts(blocks):
    text = "<!-- file: a -->\n<!-- not run: no -->\n<!-- after -->\n```python\n```\n"
    [block] = blocks.blocks_of(text)
    assert (block.name, block.value) == ("not run", "no")


def test_an_output_is_compared_with_stdout_and_stderr(run):
    page = python("import sys; print('one', flush=True); print('two', file=sys.stderr)")
    assert run(page + output("one\ntwo")).failures == []
    [failure] = run(page + output("one\nthree")).failures
    assert "page.md:7" in failure
    assert "not printed: three" in failure


def test_a_program_that_fails_or_warns_is_reported_with_its_line(run):
    result = run(python("x = 1") + python("import warnings; warnings.warn('old')"))
    assert result.num_run == 2
    [failure] = result.failures
    assert "page.md:7" in failure
    assert "UserWarning: old" in failure


def test_a_program_continues_the_one_before(run):
    page = python("x = 1; print(x)") + output("1")
    page += python("print(x + 1)", "<!-- continues -->") + output("2")
    assert run(page).failures == []
    page = python("x = 1") + python("print(x + 1)")
    assert "NameError" in run(page).failures[0]


def test_a_program_has_an_empty_folder(run):
    code = "import os; assert os.listdir() == ['program.py']; open('a', 'w').close()"
    assert run(python(code) * 2).failures == []


def test_files_are_there_for_commands(run):
    page = python("x = 3", "<!-- file: mine.py -->")
    page += "```bash\npython -c 'import mine; print(mine.x)'\n```\n" + output("3")
    assert run(page).failures == []


def test_commands_stop_at_the_first_error(run):
    [failure] = run("```bash\nfalse\necho no\n```\n").failures
    assert "exit code 1" in failure
    assert "no\n" not in failure


def test_a_console_block_is_compared_with_what_its_commands_print(run):
    page = "```console\n$ echo one\none\n$ ls none_such\n...\n$ echo two; false\ntwo\n```\n"
    result = run(page)
    assert (result.num_run, result.failures) == (1, [])
    [failure] = run(page.replace("\none\n", "\nthree\n")).failures
    assert "not printed: three" in failure


def test_what_is_not_run_is_not_run(run):
    result = run(python("1 / 0", "<!-- not run: divides by zero -->"))
    assert (result.num_run, result.failures) == (0, [])


@pytest.mark.slow
def test_a_configuration_is_checked(run):
    page = "<!-- inside: trainer.init -->\n```yaml\nloop: {max_stepz: 1}\n```\n"
    page += "```yaml\nloop: {max_steps: 1}\n```\n"
    misspelt, part = run(page).failures
    assert "trainer.init.loop.max_stepz" in misspelt
    assert "is no whole file" in part


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step 1 | 0:00:05 left", "step 1 | 1:20 left"),
        ("2026-11-24 18:08:09,100 INFO: saved", "2027-01-02 03:04:05,999 INFO: saved"),
        ("took 0.2 s at 1,200 samples/s", "took 12.5 s at 3 samples/s"),
        ("loss 0.5012", "loss 0.5013"),
        ("--------  ----", "------------------  ----"),
        ("a\n...\nb", "a\n1\n2\nb"),
        ("a\n...", "a"),
    ],
)
def test_what_varies_from_run_to_run_is_no_difference(blocks, shown, printed):
    assert blocks.differs(shown, printed) == ""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step 1", "step 2"),
        ("loss 0.5", "loss 0.6"),
        ("loss 0.5", "lost 0.5"),
        ("a", "a\nb"),
        ("a\nb", "b\na"),
        ("a\n...\nb", "a\n1\n2"),
    ],
)
def test_a_difference_is_found(blocks, shown, printed):
    assert blocks.differs(shown, printed)


def test_outputs_are_written_into_the_page(blocks, run, tmp_path):
    result = run(python("print('new'); print('lines')") + output("old") + "after\n")
    page = tmp_path / "page.md"
    assert blocks.update(page, result.outputs) == 1
    assert output("new\nlines") in page.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8").endswith("after\n")
    assert blocks.run_page(page).failures == []


def test_an_output_that_was_cut_by_hand_is_not_written(blocks, run, tmp_path):
    result = run(python("print('new')") + output("old\n..."))
    assert blocks.update(tmp_path / "page.md", result.outputs) == 0


@pytest.mark.parametrize(
    "block",
    [
        "```bash\npython -c 'import modelzoo_trainer.data'\n```\n",
        "```bash\npython -m modelzoo_trainer.report --help\n```\n",
        "```python\nimport modelzoo_trainer.data\n```\n",
    ],
)
def test_a_former_path_of_a_module_fails(block, run):
    (failure,) = run(block).failures
    assert "DeprecationWarning: modelzoo_trainer." in failure
    assert " is now modelzoo_trainer." in failure
