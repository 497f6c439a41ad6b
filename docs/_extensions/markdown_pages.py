"""Write each page as Markdown beside its HTML, and llms.txt with a list of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

TOCTREE = re.compile(r"^```\{toctree\}\n.*?^```\n+", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"^!\[output\]\(data:\S+\)\n+", re.MULTILINE)  # of a notebook
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
LINKED = ("pictures/*.svg", "examples/*.py")
"""Files to which the Markdown links; in the HTML they have other places."""
NOT_TEXT = ("#", "```", "|", "![", "* ", "<!--")
COMMENT = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)


def keep_source(app: Sphinx, name: str, source: list[str]) -> None:
    """Remember the Markdown of a page, a notebook's after it was run."""
    text = PICTURE.sub("", COMMENT.sub("", TOCTREE.sub("", source[0]))).replace(".ipynb)", ".md)")
    sources(app.env)[name] = text.strip() + "\n"


def sources(env: Any) -> dict[str, str]:
    """Return the Markdown of the pages read so far, kept with Sphinx's environment."""
    if not hasattr(env, "markdown_pages"):
        env.markdown_pages = {}
    found: dict[str, str] = env.markdown_pages
    return found


def forget_page(app: Sphinx, env: Any, name: str) -> None:
    """Forget a page that was removed or is read again."""
    sources(env).pop(name, None)


def first_paragraph(text: str) -> str:
    """Return what a page says of itself below its title."""
    parts = [part for part in text.split("\n\n") if not part.startswith(NOT_TEXT)]
    words = " ".join(parts[0].split()) if parts else ""
    return LINK.sub(r"\1", words)


def title_of(text: str) -> str:
    """Return the first heading of a page."""
    match = re.search(r"^# (.+)$", text, re.MULTILINE)
    return match[1] if match else ""


def listing(app: Sphinx) -> str:
    """Return llms.txt: title, summary and one line for each page in the order of the site."""
    pages = sources(app.env)
    order = [name for name in ordered(app) if name in pages]
    lines = [
        f"# {app.config.project}",
        "",
        f"> {first_paragraph(pages['index'])}",
        "",
        "## Pages",
        "",
    ]
    lines += [f"- [{title_of(pages[n])}]({n}.md): {first_paragraph(pages[n])}" for n in order]
    return "\n".join(lines) + "\n"


def ordered(app: Sphinx) -> list[str]:
    """Return the names of all pages, as the toctrees list them."""
    found: list[str] = []

    def visit(name: str) -> None:
        found.append(name)
        for child in app.env.toctree_includes.get(name, []):
            if child not in found:
                visit(child)

    visit(app.config.root_doc)
    return found


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Write the Markdown of all pages into the output folder."""
    if error or app.builder.format != "html":
        return
    for name, text in sources(app.env).items():
        path = Path(app.outdir) / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for pattern in LINKED:
        for file in Path(app.srcdir).glob(pattern):
            target = Path(app.outdir) / file.relative_to(app.srcdir)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    (Path(app.outdir) / "llms.txt").write_text(listing(app), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("env-purge-doc", forget_page)
    app.connect("source-read", keep_source, priority=900)  # after notebooks have become Markdown
    app.connect("build-finished", write_pages)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
