"""Run notebooks, and give Sphinx their Markdown: the cells with what they print and draw."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from plotly_pictures import KIND, picture_of
from sphinx.application import Sphinx

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SECONDS = 150  # the longest that one cell may take


def run(text: str) -> Any:
    """Return a notebook with the outputs of its cells, run in an empty folder."""
    notebook = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=SECONDS,
            startup_timeout=SECONDS,
            extra_arguments=["--log-level=ERROR"],
        )
        client.execute(cwd=folder)  # raises CellExecutionError with the traceback
    for output in (each for cell in notebook.cells for each in cell.get("outputs", ())):
        if output.output_type == "stream":
            output.text = output.text.replace(f"{folder}/", "")
    return notebook


def to_markdown(notebook: Any) -> str:
    """Return the cells and outputs of a notebook as Markdown."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            parts += outputs_of(cell)
    return "\n\n".join(parts) + "\n"


def outputs_of(cell: Any) -> list[str]:
    """Return the outputs of a cell; neighbouring texts are joined."""
    found: list[str] = []
    text = ""
    for output in cell.outputs:
        data = output.get("data", {})
        if output.output_type == "stream":
            text += output.text
        elif "image/png" in data:
            found.append(f"![output](data:image/png;base64,{data['image/png'].strip()})")
        elif KIND in data:
            found.append(f"![output](data:image/png;base64,{picture_of(data[KIND])})")
        elif "text/plain" in data and output.output_type == "execute_result":
            text += data["text/plain"] + "\n"
    shown = last_states(text)
    return ([f"```text\n{shown}\n```"] if shown else []) + found


def last_states(text: str) -> str:
    """Return a terminal's text as it looks in the end: lines that were overwritten are gone."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in ANSI.sub("", text).split("\n")]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the JSON of a notebook by its Markdown."""
    if Path(app.env.doc2path(name)).suffix == ".ipynb":
        source[0] = to_markdown(run(source[0]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("source-read", read)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
