"""Runs with something else in the place of their files."""

import os

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.report import metrics_file
from modelzoo_trainer.tools.report import page as page_module

SECRET = "words-of-another-folder"
LOGS = "logs/20260101_000000"
EVENT = f'{{"time": 1, "event": "end", "step": 1, "outcome": "failed", "cause": "{SECRET}"}}\n'
CONTENTS = {
    "metrics.jsonl": f'{{"step": 1, "loss": 1.0, "text": "{SECRET}"}}\n',
    f"{LOGS}/events.jsonl": EVENT,
    f"{LOGS}/run.json": f'{{"environment": {{"host": "{SECRET}"}}, "settings": {{}}}}',
    f"{LOGS}/params.yaml": f"trainer: {{init: {{seed: {SECRET}}}}}\n",
    f"{LOGS}/run.log": f"2026-01-01 00:00:00,001 WARNING: {SECRET}\n",
    f"{LOGS}/sample.txt": SECRET,
    f"{LOGS}/image.png": SECRET,
    "restarts/1/ledger.json": f'{{"seconds": {{"{SECRET}": 10}}, "num_restarts": 1}}',
}
BASE64 = "d29yZHMtb2YtYW5vdGhlci1mb2xkZXI"


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch):
    monkeypatch.setattr(page_module, "plotly_js", lambda: "/* plotly */")


@pytest.fixture
def run(write_run):
    """A run with each kind of file, without words of another folder."""
    harmless = {name: text.replace(SECRET, "x") for name, text in CONTENTS.items()}
    return write_run(files=harmless)


def texts_in(html):
    return [one for one in (SECRET, BASE64) if one in html]


@pytest.mark.parametrize("name", CONTENTS)
def test_the_content_of_each_file_is_in_the_report(name, run, page_of):
    (run / name).write_text(CONTENTS[name])
    is_shown = name != "restarts/1/ledger.json"  # other names are one kind
    assert bool(texts_in(page_of(run))) is is_shown


@pytest.mark.parametrize("name", CONTENTS)
def test_a_link_that_leads_out_of_the_run_is_not_followed(name, run, page_of, tmp_path):
    (tmp_path / "private").write_text(CONTENTS[name])
    (run / name).unlink()
    (run / name).symlink_to(tmp_path / "private")
    if name == "metrics.jsonl":
        with pytest.raises(ConfigError, match=r"metrics\.jsonl.*a symbolic link out of its folder"):
            page_of(run)
    else:
        assert texts_in(page_of(run)) == []


@pytest.mark.parametrize("name", [LOGS, "logs", "restarts", "restarts/1"])
def test_a_folder_that_is_a_link_out_of_the_run_is_not_followed(name, run, page_of, tmp_path):
    for file, text in CONTENTS.items():
        (run / file).write_text(text if file.startswith(name) else "")
    (run / name).rename(tmp_path / "private")
    (run / name).symlink_to(tmp_path / "private")
    (run / "metrics.jsonl").write_text(CONTENTS["metrics.jsonl"].replace(SECRET, "x"))
    assert texts_in(page_of(run)) == []


def test_links_within_the_run_and_to_the_run_are_followed(run, page_of, tmp_path):
    (run / "sample").write_text(SECRET)
    (run / LOGS / "sample.txt").unlink()
    (run / LOGS / "sample.txt").symlink_to("../../sample")
    (tmp_path / "link").symlink_to(run)
    assert texts_in(page_of(tmp_path / "link")) == [SECRET]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", [*CONTENTS, ".lock"])
def test_what_is_no_file_is_not_waited_for(name, kind, run, page_of):
    path = run / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
    if name == "metrics.jsonl":
        with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
            page_of(run)
    else:
        assert "<h2>Overview</h2>" in page_of(run)


def test_a_line_without_an_end_is_read_in_parts(run, read, monkeypatch):
    monkeypatch.setattr(metrics_file, "_LONGEST_LINE", 100)
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(1000)
    [found] = read(run)
    assert found.metrics.num_broken > 5
    assert len(found.metrics.series["loss"].values) == 1
