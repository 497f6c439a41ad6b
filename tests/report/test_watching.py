import threading
import urllib.error
import urllib.request

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.report import page as page_module
from modelzoo_trainer.report import watching
from modelzoo_trainer.report.command import main
from modelzoo_trainer.report.page import MARKER
from tests.report.run_lines import losses, to_text


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(page_module, "plotly_js", lambda: "/* plotly */")
    monkeypatch.setattr(watching, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(watching, "_SHARE", 0)


@pytest.fixture
def run(write_run):
    return write_run(lines=losses(3))


@pytest.fixture
def get(run, tmp_path):
    server = watching.make_server([run], 0, tmp_path / "out.html")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def fetch(path="/", host=None):
        request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}")
        if host is not None:
            request.add_header("Host", host)
        with urllib.request.urlopen(request) as answer:
            return answer.read().decode()

    yield fetch
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_page_is_served_and_written(get, tmp_path):
    assert MARKER in get()
    assert "connect-src 'self'" in get()
    assert "connect-src 'none'" in (tmp_path / "out.html").read_text()


def test_a_change_of_the_run_gives_another_version(get, run, tmp_path):
    before = get("/version")
    assert get("/version") == before
    (run / "metrics.jsonl").write_text(to_text(losses(50)))
    after = get("/version")
    assert after != before
    assert f'"version":"{after}"' in get()
    assert ">50<" in (tmp_path / "out.html").read_text()


def test_a_run_that_is_removed_leaves_the_last_page(get, run, capsys):
    (run / "metrics.jsonl").unlink()
    assert MARKER in get()
    assert MARKER in get()
    assert capsys.readouterr().err.count("not refreshed") == 1


@pytest.mark.parametrize("path", ["/../metrics.jsonl", "/metrics.jsonl", "/?x"])
def test_nothing_else_is_served(path, get):
    with pytest.raises(urllib.error.HTTPError, match="404") as error:
        get(path)
    error.value.close()


def test_another_name_of_this_computer_is_refused(get):
    with pytest.raises(urllib.error.HTTPError, match="403") as error:
        get("/", host="evil.example:80")
    error.value.close()


def test_a_port_that_is_taken_is_refused(run, capsys):
    with watching.make_server([run], 0) as server:
        assert main([str(run), "--watch", str(server.server_port)]) == 2
        assert str(server.server_port) in capsys.readouterr().err


def test_a_target_that_is_no_report_is_refused_before_anything_is_served(run, tmp_path):
    (tmp_path / "out.html").write_text("mine")
    with pytest.raises(ConfigError, match="not a report"):
        watching.make_server([run], 0, tmp_path / "out.html")
