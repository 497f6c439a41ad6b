import os
import subprocess
import sys

import pytest

from modelzoo_trainer.tools.report import page as page_module
from modelzoo_trainer.tools.report.command import main
from modelzoo_trainer.tools.report.page import MARKER
from tests.tools.report.run_lines import losses


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch):
    monkeypatch.setattr(page_module, "plotly_js", lambda: "/* plotly */")


@pytest.fixture
def run(write_run):
    return write_run(lines=losses(3))


def test_a_report_is_written_and_said(run, tmp_path, capsys):
    assert main([str(run), "-o", str(tmp_path / "out.html")]) == 0
    assert MARKER in (tmp_path / "out.html").read_text()
    assert str(tmp_path / "out.html") in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_notes_of_the_page_are_said(write_run, tmp_path, capsys):
    runs = [
        write_run("a", [*losses(3), "no JSON", *losses(5)[3:]]),
        write_run("b", [], events=[{"time": 1.0, "event": "start", "step": 0}]),
        write_run("c", losses(3)),
    ]
    with (runs[2] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert main([*map(str, runs), "-o", str(tmp_path / "out.html")]) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told[:-1]] == ["a", "b", "c"]
    words = ("1 of 6 lines", "metrics.jsonl is empty", "incomplete last line", "out.html")
    assert [word in line for word, line in zip(words, told, strict=True)] == [True] * 4


def test_a_file_that_has_no_metrics_is_refused(tmp_path, capsys):
    (tmp_path / "run.log").write_text("2026-01-01 INFO: a\n" * 3)
    assert main([str(tmp_path / "run.log"), "-o", str(tmp_path / "out.html")]) == 2
    assert "run.log" in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


def test_the_default_is_in_the_working_folder_and_its_path_is_said(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["run"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert str(tmp_path / "report.html") in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "report.html in the working directory" in " ".join(capsys.readouterr().out.split())


def test_a_report_is_overwritten_also_through_a_link(run, tmp_path):
    target, link = tmp_path / "out.html", tmp_path / "link.html"
    target.write_text(f"<head>{MARKER}</head> of yesterday")
    link.symlink_to(target)
    assert main([str(run), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert "of yesterday" not in target.read_text()


def test_an_empty_file_is_overwritten(run, tmp_path):
    (tmp_path / "out.html").touch()
    assert main([str(run), "-o", str(tmp_path / "out.html")]) == 0


@pytest.mark.parametrize("content", ["my thesis", f"{'x' * 5000}{MARKER}"], ids=["text", "late"])
def test_what_is_no_report_is_not_overwritten(content, run, tmp_path, capsys):
    target = tmp_path / "out.html"
    target.write_text(content)
    assert main([str(run), "-o", str(target)]) == 2
    assert target.read_text() == content
    assert str(target) in capsys.readouterr().err


@pytest.mark.parametrize("target", ["", "none/out.html", "run/metrics.jsonl"])
def test_a_target_that_cannot_be_is_refused(target, run, tmp_path, capsys):
    before = (run / "metrics.jsonl").read_text()
    assert main([str(run), "-o", str(tmp_path / target)]) == 2
    assert str(tmp_path / target) in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before


def test_a_pipe_is_refused_at_once(run, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main([str(run), "-o", str(tmp_path / "pipe")]) == 2
    assert "pipe" in capsys.readouterr().err


def test_a_disk_that_refuses_leaves_the_old_report(run, tmp_path, capsys, monkeypatch):
    target = tmp_path / "out.html"
    target.write_text(f"{MARKER} old")

    def refuse(self, other):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    assert main([str(run), "-o", str(target)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert target.read_text().endswith("old")
    assert not list(tmp_path.glob(".*"))


def test_nothing_is_written_if_a_folder_is_no_run(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main([str(run), str(tmp_path / "empty"), "-o", str(tmp_path / "out.html")]) == 2
    assert str(tmp_path / "empty") in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


def test_the_runs_in_a_folder_are_named_as_a_command(write_run, tmp_path, capsys):
    for name in ("b b", "a"):
        write_run(f"runs/{name}", losses(1))
    assert main([str(tmp_path / "runs"), "-o", str(tmp_path / "report.html")]) == 2
    command = capsys.readouterr().err.splitlines()[-1].strip()
    assert command == f"modelzoo-trainer report {tmp_path}/runs/a '{tmp_path}/runs/b b'"


@pytest.mark.parametrize("port", ["x", "-1", "70000", "8.5"])
def test_a_port_must_be_a_number(port, run, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(run), f"--watch={port}"])
    assert repr(port) in capsys.readouterr().err


@pytest.mark.slow
def test_the_module_runs_alone_and_imports_no_torch(run, tmp_path):
    code = (
        "import sys; from modelzoo_trainer.tools.report.command import main; "
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    target = tmp_path / "out.html"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), "-o", str(target)], capture_output=True, text=True
    )
    assert (done.returncode, target.is_file()) == (0, True), done.stderr
