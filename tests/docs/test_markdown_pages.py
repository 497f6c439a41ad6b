"""The site has its pages as Markdown, with the files to which they link."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.docs.conftest import DOCS, load_script

PAGE = "# Title\n\nWhat it is. [`gan.py`](examples/gan.py) ![curve](pictures/ConstantLR.svg)\n"


def test_files_that_a_page_links_to_are_beside_it(tmp_path: Path) -> None:
    env = SimpleNamespace(markdown_pages={"index": PAGE}, toctree_includes={})
    app = SimpleNamespace(
        builder=SimpleNamespace(format="html"),
        config=SimpleNamespace(project="project", root_doc="index"),
        env=env,
        outdir=tmp_path,
        srcdir=DOCS,
    )
    load_script("_extensions/markdown_pages.py").write_pages(app, None)
    assert (tmp_path / "index.md").read_text(encoding="utf-8") == PAGE
    for name in ("examples/gan.py", "pictures/ConstantLR.svg"):
        assert (tmp_path / name).read_bytes() == (DOCS / name).read_bytes()
