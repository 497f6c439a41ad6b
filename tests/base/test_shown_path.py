"""Paths as messages show them."""

from pathlib import Path

from modelzoo_trainer.base.shown_path import shown_path


def test_a_path_below_the_working_folder_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "runs" / "a") == "runs/a"
    assert shown_path("runs/a") == "runs/a"
    assert shown_path(tmp_path) == "."


def test_a_path_elsewhere_is_given_in_full(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "runs") == str(tmp_path / "runs")
    assert shown_path(Path("/")) == "/"


def test_a_working_folder_that_is_gone_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("os.path.abspath", lambda path: _gone())
    assert shown_path("/runs/a") == "/runs/a"


def _gone():
    raise FileNotFoundError("the working folder was removed")
