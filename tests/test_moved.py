"""Modules under their former paths."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from modelzoo_trainer._moved import MOVED, present_path

PREFIX = "modelzoo_trainer."
ROOT = Path(__file__).resolve().parents[1]
# Those that pages and messages have named.
DOCUMENTED = {
    "advice": "Advised",
    "constraints": "PositiveInt",
    "data": "DataProcessor",
    "data.processor": "DataProcessor",
    "interceptors": "event",
    "launch": "worker",
    "loggers.logger": "Logger",
    "models": "model_class",
    "models.decoder_names": None,
    "models.freezing": None,
    "models.registry": "model_class",
    "plugins": "set_enabled",
    "preprocessing.hooks": "text_read_hook",
    "preprocessing.interface": None,
    "sparsity": None,
    "stores": None,
}


def imported(path: str) -> tuple[object, list[str]]:
    """Import a module under a former path for the first time; return it and the warnings."""
    for name in list(sys.modules):
        if name.startswith(PREFIX) and present_path(name.removeprefix(PREFIX)):
            del sys.modules[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = importlib.import_module(PREFIX + path)
    assert {warning.category for warning in caught} == {DeprecationWarning}
    return found, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("path", sorted({*MOVED, *DOCUMENTED}))
@pytest.mark.slow_cases(every=4)
def test_a_former_path_gives_the_same_module(path: str) -> None:
    new = PREFIX + str(present_path(path))
    found, messages = imported(path)
    assert messages[-1].startswith(f"{PREFIX}{path} is now {new}; ")
    module = importlib.import_module(new)
    assert found is module
    assert (module.__name__, module.__spec__.name) == (new, new)  # type: ignore[union-attr]
    name = DOCUMENTED.get(path)
    assert name is None or hasattr(found, name)


@pytest.mark.slow
def test_the_warning_names_the_line_of_the_import(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("\nfrom modelzoo_trainer.data import TensorRows\n")
    words = [sys.executable, "-W", "default", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"{program}:2: DeprecationWarning: modelzoo_trainer.data is now" in done.stderr


def test_no_former_path_is_a_present_one() -> None:
    assert [path for path in MOVED if present_path(MOVED[path])] == []


@pytest.mark.slow
def test_a_program_runs_under_its_former_path() -> None:
    words = [sys.executable, "-m", "modelzoo_trainer.report", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "RUN_DIR" in done.stdout


@pytest.mark.filterwarnings("ignore:modelzoo_trainer.data is now")
def test_an_absent_module_is_absent() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"modelzoo_trainer\.data\.nowhere"):
        importlib.import_module("modelzoo_trainer.data.nowhere")


def test_no_page_names_a_former_path() -> None:
    globs = ["README.md", "docs/**/*.*", "configs/**/*.yaml", "benchmarks/*.py", ".ci/*"]
    kinds = {".md", ".ipynb", ".py", ".yaml", ".sh", ".sbatch", ""}
    pages = [page for one in globs for page in ROOT.glob(one) if page.suffix in kinds]
    named = {(page.name, path) for page in pages for path in paths_in(page.read_text("utf-8"))}
    assert len(named) > 30
    assert [(page, path) for page, path in named if present_path(path)] == []


def paths_in(text: str) -> set[str]:
    """Return the paths in this package that a text names, or imports from it."""
    imported = re.findall(r"from modelzoo_trainer import ([\w, ]+|\([\w, \n\\]+\))", text)
    names = {name for one in imported for name in re.findall(r"\w+", one)}
    return names | set(re.findall(r"modelzoo_trainer\.([a-z_]+(?:\.\w+)*)", text))


def test_both_kinds_of_imports_are_seen() -> None:
    text = "import modelzoo_trainer.data.x\nfrom modelzoo_trainer import Trainer, models as m\n"
    assert paths_in(text) == {"data.x", "Trainer", "models", "as", "m"}
