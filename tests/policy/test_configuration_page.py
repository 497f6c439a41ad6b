"""What the pages on the configuration and on checkpoints say is what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelzoo_trainer.base.exit_codes import exit_code
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.options import OPTIONS
from modelzoo_trainer.config.overrides import apply_overrides, parse_override
from modelzoo_trainer.config.shipped import shipped_names

BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
CHANGE = re.compile(r"`--set ([a-z]\S*=\S+)`")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_table_of_options_is_that_of_the_program(page):
    rows = [
        f"| `--{option.name}{f' {option.metavar}' if option.metavar else ''}` | {option.help} |"
        for option in OPTIONS
    ]
    assert [line for line in page.splitlines() if line.startswith("| `--")] == rows


@pytest.mark.parametrize("name", ["configuration", "checkpoints", "stops"])
def test_the_examples_are_right(root, name):
    names = shipped_names()
    blocks = BLOCK.findall((root / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    assert blocks
    for text in blocks:
        assert check_config(read_text(text, "page.yaml"), names)


def test_the_table_of_stops_has_the_codes_of_the_program(root):
    page = (root / "docs" / "stops.md").read_text(encoding="utf-8")
    table = page.partition("## Stop a run")[2].partition("\n\nAll of these")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    told = {
        reason: int(row[-1])
        for row in rows
        for reason in re.findall(r'"(.+?)"', row[2] if len(row) == 5 else "")
    }
    reasons = ("SIGINT", "SIGTERM", "SIGUSR1", "stop file", "max_time")
    assert told == {reason: exit_code(reason) for reason in reasons}


def test_the_commands_of_checkpoints_exist(root):
    page = (root / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    found = set(re.findall(r"modelzoo-trainer checkpoint (\w+)", page))
    assert found == {"list", "info", "verify", "diff", "export", "convert", "delete"}


def test_the_changes_can_be_made(page):
    changes = [change for change in CHANGE.findall(page) if "trainer[1]" not in change]
    root = read_text("trainer: {init: {schedulers: [{LinearLR: {}}]}}", "page.yaml")
    assert len(changes) == 3
    assert apply_overrides(root, [parse_override(change) for change in changes]) is not root
