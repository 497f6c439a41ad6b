"""Every row of the four tables of behaviours has a test, or a reason why not, on its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SYSTEMS = {
    "arctic_training": ("at", 50),
    "pytorch_accelerated": ("pa", 52),
    "fabric": ("fb", 40),
}
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def page(name: str) -> str:
    return (DOCS / f"from_{name}.md").read_text(encoding="utf-8")


def sources_of(name: str) -> str:
    files = sorted(Path(__file__).parent.glob(f"test_{name}*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def decided_against(text: str) -> dict[str, str]:
    """Return the reasons in the table under the heading "Decided against"."""
    lines = section(text, "Decided against").splitlines()
    rows = [line.strip().strip("|").split("|") for line in lines if "|" in line]
    return {row[0].strip(" `"): row[1].strip() for row in rows[2:]}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_row_has_a_test_or_a_reason(name):
    prefix, num = SYSTEMS[name]
    refused = decided_against(page(name))
    tested = set(re.findall(rf"def test_{prefix}_(\d\d)_", sources_of(name)))
    for number in range(1, num + 1):
        row = f"{prefix.upper()}-{number:02d}"
        assert (f"{number:02d}" in tested) != (row in refused), row
        assert row not in refused or len(refused[row]) > 20, row
        assert row in page(name), row


def test_every_class_of_the_model_zoo_has_a_test_or_a_reason():
    text = page("cerebras")
    tables = "".join(section(text, name) for name in ("Callbacks", "Loggers", "Core callbacks"))
    rows = re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE)
    refused = decided_against(text)
    tested = set(re.findall(r"def test_c_(\w+?)__", sources_of("cerebras")))
    assert len(rows) > 30
    assert {_flat(row) for row in rows} <= tested
    assert all(len(reason) > 20 for reason in refused.values())


def _flat(name: str) -> str:
    """Return a class's name as the tests write it: CheckLoss is check_loss."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return words.lower()


@pytest.mark.parametrize("name", [*SYSTEMS, "cerebras"])
def test_what_a_page_links_to_is_there(name):
    for target, _ in LINK.findall(page(name)):
        if "://" not in target:
            assert (DOCS / target).exists(), target
