"""Converted files."""

from pathlib import Path

import pytest

from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.tools.foreign_configs.conversion import convert_file

FILES = Path(__file__).parent


@pytest.fixture
def convert(tmp_path):
    """Return a function from the text of a file to its converted `trainer` and the findings."""

    def of(text, **options):
        path = tmp_path / "theirs.yaml"
        path.write_text(text)
        return converted(path, **options)

    return of


@pytest.fixture
def convert_named():
    """Return a function from the name of a file in this folder to the same."""
    return lambda name, **options: converted(FILES / name, **options)


def converted(path, **options):
    text, findings = convert_file(path, **options)
    return to_plain(read_text(text, "ours.yaml"))["trainer"], findings
