"""Where CI runs a sample of the cases, benchmarks/reliability.py runs all."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.reliability import all_rows

ROOT = Path(__file__).resolve().parents[2]
SOAK = re.compile(r"^@pytest\.mark\.soak|marks=.*\b(soak|SOAK)\b", re.MULTILINE)


def test_every_file_with_cases_that_ci_leaves_out_is_in_a_row() -> None:
    rows = [path for row in all_rows() for path in row.paths]
    assert len(rows) == len(set(rows))
    assert [path for path in rows if not (ROOT / path).exists()] == []
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").glob("[!p]*/**/test_*.py")]
    sampled = [one for one in files if SOAK.search((ROOT / one).read_text(encoding="utf-8"))]
    assert len(sampled) > 20
    assert [one for one in sampled if not {str(one), *map(str, one.parents)} & set(rows)] == []


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
