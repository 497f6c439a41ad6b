"""How Sphinx builds the site: sphinx-build -W docs site."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

project = "modelzoo_trainer"
author = "the modelzoo_trainer authors"
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]["version"]

extensions = ["myst_parser", "notebooks", "markdown_pages"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
root_doc = "index"
exclude_patterns = ["_extensions", "_templates", "jobs", "**/.ipynb_checkpoints"]
templates_path = ["_templates"]

myst_heading_anchors = 4  # [text](page.md#heading), as on GitHub
myst_links_external_new_tab = False

html_theme = "pydata_sphinx_theme"
html_title = "modelzoo_trainer"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False  # each page is there as Markdown, beside its HTML
html_show_sourcelink = False
html_show_sphinx = False
html_sidebars = {"**": ["globaltoc.html"]}
html_theme_options = {
    "navbar_center": [],
    "navbar_persistent": ["search-button-field"],
    "navbar_end": ["theme-switcher"],
    "primary_sidebar_end": [],
    "secondary_sidebar_items": ["page-toc", "as_markdown"],
    "footer_start": [],
    "footer_end": [],
    "show_prev_next": True,
    "show_toc_level": 2,
}
# `default` would be guessed for blocks without a language.
highlight_language = "text"
