import http.client
import threading
import urllib.error
import urllib.request

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.report import page as page_module
from modelzoo_trainer.tools.report import watching
from modelzoo_trainer.tools.report.command import main
from modelzoo_trainer.tools.report.page import MARKER
from tests.tools.report.run_lines import losses, to_text


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

    def fetch(path="/"):
        url = f"http://127.0.0.1:{server.server_port}{path}"
        with urllib.request.urlopen(url) as answer:
            return answer.read().decode()

    fetch.port = server.server_port
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


def status_of(port, hosts):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.putrequest("GET", "/version", skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    with connection.getresponse() as answer:
        return answer.status


@pytest.mark.parametrize(
    "hosts",
    [
        *(["evil.example"], ["evil.example:80"], ["evil.example:PORT"], ["localhost.evil.example"]),
        *(["127.0.0.1.evil.example"], ["evil.example@127.0.0.1"], ["localhost:80:80"]),
        *(["127.0.0.1:"], ["127x0y0z1"], [""], [], ["localhost", "evil.example"]),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_a_request_for_another_name_is_refused(hosts, get):
    assert status_of(get.port, [host.replace("PORT", str(get.port)) for host in hosts]) == 403


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT", "localhost", "[::1]:PORT", "[::1]"],
)
def test_this_host_is_served_in_any_spelling_and_through_a_tunnel(host, get):
    assert status_of(get.port, [host.replace("PORT", str(get.port))]) == 200
    assert status_of(get.port, [host.replace("PORT", "9000")]) == 200


def test_a_port_that_is_taken_is_refused(run, capsys):
    with watching.make_server([run], 0) as server:
        assert main([str(run), "--watch", str(server.server_port)]) == 2
        assert str(server.server_port) in capsys.readouterr().err


def test_a_target_that_is_no_report_is_refused_before_anything_is_served(run, tmp_path):
    (tmp_path / "out.html").write_text("mine")
    with pytest.raises(ConfigError, match="not a report"):
        watching.make_server([run], 0, tmp_path / "out.html")
