"""A user's module with the name of the other package of this distribution."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modelzoo_trainer.base.sibling import require_sibling
from modelzoo_trainer.cli.command import main

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = "raise SystemExit('it was run')\n"


@pytest.fixture
def first_on_path(tmp_path, monkeypatch):
    """Return a function that prepends a folder to sys.path, with the package not imported."""

    def put(folder):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        monkeypatch.delitem(sys.modules, "backends", raising=False)
        return folder

    return put


def test_a_folder_called_backends_is_named_and_not_run(tmp_path, first_on_path, capfd):
    package = first_on_path(tmp_path) / "backends"
    package.mkdir()
    (package / "__init__.py").write_text(FOREIGN)
    assert main(["--params", "params.yaml"]) == 2
    assert capfd.readouterr().err == (
        f"package 'backends' was found in {tmp_path}, but modelzoo-trainer's own is in {ROOT}. "
        "Rename 'backends', which comes earlier on sys.path, or start Python in another folder or "
        "with python -P.\n"
    )


def test_a_module_called_backends_is_named_and_not_run(tmp_path, first_on_path):
    (first_on_path(tmp_path) / "backends.py").write_text(FOREIGN)
    with pytest.raises(ImportError, match=f"module 'backends.py' was found in {tmp_path}, but"):
        require_sibling("backends")


def test_another_installed_project_called_backends_is_named(tmp_path, first_on_path):
    package = first_on_path(tmp_path / "site-packages") / "backends"
    package.mkdir()
    (package / "__init__.py").write_text(FOREIGN)
    with pytest.raises(ImportError, match=r"site-packages, but .* uninstall that"):
        require_sibling("backends")


@pytest.mark.parametrize("file", [None, "/home/me/backends.py"])
def test_a_module_called_backends_that_is_already_imported_is_named(file, monkeypatch):
    foreign = ModuleType("backends")
    if file is not None:
        foreign.__file__ = file
    monkeypatch.setitem(sys.modules, "backends", foreign)
    with pytest.raises(ImportError, match=f"already imported \\({file or 'from no file'}\\)"):
        require_sibling("backends")


def test_a_folder_called_backends_without_modules_does_not_matter(tmp_path, first_on_path):
    (first_on_path(tmp_path) / "backends").mkdir()
    require_sibling("backends")


def test_a_package_that_is_gone_is_named():
    with pytest.raises(ImportError, match="package 'zoo_gone' is not beside modelzoo_trainer in"):
        require_sibling("zoo_gone")


def test_the_sibling_is_found_where_it_belongs():
    require_sibling("backends")


def shadowed(tmp_path, *command):
    """Run Python in a folder with a module named backends; return exit code and errors."""
    (tmp_path / "backends.py").write_text(FOREIGN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        (sys.executable, *command), cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("options", [["--check"], ["--plan"], ["--compile-only"], []])
@pytest.mark.slow_cases(every=4)
def test_every_command_started_beside_a_module_called_backends_says_so(tmp_path, options):
    code, err = shadowed(tmp_path, "-m", "modelzoo_trainer", "-p", "params.yaml", *options)
    assert code == 2
    assert err.startswith(f"module 'backends.py' was found in {tmp_path}, but modelzoo-trainer's")
    assert len(err.splitlines()) == 1


def test_the_script_in_the_checkout_reaches_its_own_package(tmp_path):
    code, err = shadowed(tmp_path, str(ROOT / "run.py"), "-p", "gone.yaml")
    assert code == 2
    assert "gone.yaml" in err
    assert "backends" not in err


@pytest.mark.slow
def test_python_says_so_when_the_trainer_is_imported(tmp_path):
    code, err = shadowed(tmp_path, "-c", "from modelzoo_trainer import Trainer")
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith(f"ImportError: module 'backends.py' was found in {tmp_path}, but")
