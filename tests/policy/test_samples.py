"""Where CI runs a sample of the cases, benchmarks/reliability.py runs all."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.reliability import all_rows, sampled_files

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_with_cases_that_ci_leaves_out_is_in_a_row() -> None:
    in_rows = [path for row in all_rows() for path in row.paths]
    assert len(in_rows) == len(set(in_rows))
    assert set(sampled_files()) <= set(in_rows)
    assert [path for path in in_rows if not (ROOT / path).is_file()] == []


def test_the_page_of_evidence_says_of_every_row_when_it_last_ran_whole() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    lines = {one.rpartition("| `")[2]: one for one in page.splitlines() if "| `tests/" in one}
    for row in all_rows():
        key = " ".join(f"`{path}`" for path in row.paths)[1:] + " |"
        assert re.search(r" \| \d{4}-\d\d-\d\d, [0-9a-f]{8} \| `tests/", lines.pop(key))
    assert lines == {}


def test_a_sample_says_what_it_covers() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, one in enumerate(lines):
            if one.startswith("@pytest.mark.soak_cases("):
                above = lines[number - 1], lines[number - 2]
                assert any(line.startswith("# CI: ") for line in above), f"{path}:{number + 1}"
