"""What the README promises; its programs are run by tests/docs/test_pages.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CI = ["ci: train", "ci: test", "ci: xla", "ci: processes"]


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("marker", CI)
def test_the_commands_that_ci_runs_are_there_once(marker: str, readme: str) -> None:
    assert len(re.findall(rf"^<!-- {marker} -->\n```bash$", readme, re.MULTILINE)) == 1


def test_it_is_short(readme: str) -> None:
    assert len(readme.splitlines()) <= 150


def test_its_first_program_shows_its_output(readme: str) -> None:
    after_first = readme.partition("```python\n")[2].partition("```\n")[2]
    assert after_first.startswith("\n<!-- output -->\n```text\n")


def test_it_leads_to_every_page_of_the_guide(readme: str, root: Path) -> None:
    pages = {path.name for path in (root / "docs").glob("from_*.md")}
    pages |= {"install.md", "quickstart_python.md", "quickstart_yaml.md", "model_and_data.md"}
    pages |= {"callbacks.md", "checkpoints.md", "stops.md", "scaling.md", "how_it_works.md"}
    assert {name for name in pages if f"(docs/{name})" not in readme} == set()
