"""What the page on many processes says of options is what the backend takes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from backends.parallel.backend import ParallelBackend
from backends.parallel.config import ParallelSettings

ROW = re.compile(r"^\| `(\w+)` \| (\S+) \|", re.MULTILINE)
DEFAULTS = {"none": None, "false": False, "600.0": 600.0}


def test_the_table_of_options_is_that_of_the_backend(root: Path) -> None:
    page = (root / "docs" / "scaling.md").read_text(encoding="utf-8")
    told = {name: DEFAULTS[default] for name, default in ROW.findall(page)}
    parameters = inspect.signature(ParallelBackend.__init__).parameters.values()
    known = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert told == known
    assert {*known} == {*ParallelSettings.OPTIONS, "timeout"}
