"""The table of devices that published decoders fit on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import published_plans
from tests.compat.corpus_here import CONFIGURATIONS

pytestmark = [pytest.mark.corpus, pytest.mark.slow]

SMALL = "models/nlp/gpt3/configs/muP/params_gpt3_40M.yaml"


def test_the_page_has_every_decoder() -> None:
    """To renew it: python -m benchmarks.published_plans FOLDER --write."""
    paths = {str(path.relative_to(CONFIGURATIONS)): path for path in CONFIGURATIONS.rglob("*.yaml")}
    decoders = {
        name for name, path in paths.items() if published_plans.decoder_plan(path) is not None
    }
    assert published_plans.rows_of_page().keys() == decoders


def test_a_row_of_the_page_is_what_a_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = published_plans.rows_of_page()[SMALL]
    page = tmp_path / "page.md"
    page.write_text(f"a\n{published_plans._BEGIN}{published_plans._END}b\n")
    monkeypatch.setattr(published_plans, "_PAGE", page)
    path = tmp_path / "files" / SMALL
    path.parent.mkdir(parents=True)
    shutil.copyfile(CONFIGURATIONS / SMALL, path)

    assert published_plans.main([str(tmp_path / "files"), "--write"]) == 0

    text = page.read_text()
    assert text.startswith("a\n")
    assert text.endswith("b\n")
    assert published_plans.rows_of_page() == {SMALL: expected}
