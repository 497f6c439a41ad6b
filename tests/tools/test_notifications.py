"""E-mails and Slack messages, sent to local servers."""

import json
import logging
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from modelzoo_trainer import Callback, TrainingLoop
from modelzoo_trainer.errors import ConfigError, StopTraining
from modelzoo_trainer.tools import notification
from modelzoo_trainer.tools.notification import EmailNotification, SlackNotification

PASSWORD = "CEREBRAS_NOTIFICATION_PASSWORD"
TOKEN = "CEREBRAS_SLACK_BOT_TOKEN"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in (PASSWORD, TOKEN, "CEREBRAS_NOTIFICATION_MAILFROM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CEREBRAS_NOTIFICATION_ENDPOINT", raising=False)
    monkeypatch.setenv("no_proxy", "*")


def serving(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Mailbox(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"220 ready\r\n")
        while line := self.rfile.readline().strip():
            word = line.split()[0].upper()
            self.server.lines.append(line.decode())
            if word == b"EHLO":
                self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
            elif word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                mail = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.mails.append(mail.decode())
                self.wfile.write(b"250 ok\r\n")
            else:
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")


@pytest.fixture
def mail_server():
    server = socketserver.TCPServer(("127.0.0.1", 0), Mailbox)
    server.lines, server.mails = [], []
    yield from serving(server)


class Hook(BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers["Content-Length"])
        given = json.loads(self.rfile.read(length))
        self.server.posts.append((self.headers.get("Authorization"), given))
        status, answer = self.server.answer
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def web_server():
    server = HTTPServer(("127.0.0.1", 0), Hook)
    server.posts, server.answer = [], (200, {"ok": True})
    server.url = f"http://127.0.0.1:{server.server_port}/post"
    yield from serving(server)


def mailing(server, **arguments):
    port = server.server_address[1]
    given = {"mailto": "a@x.org,b@x.org", "mailfrom": "me@x.org", "server_name": "127.0.0.1"}
    return EmailNotification(**(given | {"port": port} | arguments))


class Fails(Callback):
    def __init__(self, hook):
        self.hook = hook

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self._fail("fit")

    def on_train_step_end(self, trainer, model, outputs, batch):
        self._fail("train")

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self._fail("validate")

    def _fail(self, hook):
        if hook == self.hook:
            raise ZeroDivisionError("one over none")


def run(trainer, batches):
    trainer.fit(batches, batches[:1])
    trainer.close()


def test_the_end_of_a_fit_is_mailed(make, batches, mail_server):
    run(make(mailing(mail_server)), batches)
    (mail,) = mail_server.mails
    assert "Subject: Training notification: Training ended at step 4" in mail
    assert "From: me@x.org" in mail
    assert "To: a@x.org, b@x.org" in mail
    assert "model_dir: " in mail
    rcpts = [line for line in mail_server.lines if line.startswith("rcpt")]
    addresses = [line.lower().removeprefix("rcpt to:") for line in rcpts]  # in any case
    assert addresses == ["<a@x.org>", "<b@x.org>"]


@pytest.mark.parametrize(
    ("hook", "what"), [("fit", "Training"), ("train", "Training"), ("validate", "Validation")]
)
@pytest.mark.slow_cases(every=4)
def test_an_error_is_mailed_once(make, batches, mail_server, hook, what):
    trainer = make(mailing(mail_server, subject="Ours"), Fails(hook))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches, batches[:1])
    trainer.close()
    (mail,) = mail_server.mails
    assert f"Subject: Ours: {what} failed at step" in mail
    assert "ZeroDivisionError: one over none" in mail


def test_each_fit_is_reported(make, batches, mail_server):
    trainer = make(mailing(mail_server))
    trainer.fit(batches)
    trainer.loop.max_steps = 6
    trainer.fit(batches)
    trainer.close()
    assert len(mail_server.mails) == 2


def test_a_validation_alone_tells_only_of_errors(make, batches, mail_server):
    trainer = make(mailing(mail_server))
    trainer.validate(batches)
    trainer.close()
    assert mail_server.mails == []


def test_a_password_is_not_sent_without_encryption(make, batches, mail_server, monkeypatch, caplog):
    monkeypatch.setenv(PASSWORD, "hush")
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        run(make(mailing(mail_server)), batches)
    assert mail_server.mails == []
    assert "does not support encryption" in caplog.text
    assert not any("hush" in line or "AUTH" in line for line in mail_server.lines)
    assert "hush" not in caplog.text


def test_a_server_that_is_not_there_does_not_end_the_run(make, batches, caplog):
    # Bound, so that no other process gets the port, but not listening.
    with socketserver.TCPServer(("127.0.0.1", 0), Mailbox, bind_and_activate=False) as gone:
        gone.server_bind()
        trainer = make(mailing(gone))
        with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
            run(trainer, batches)
    assert trainer.global_step == 4
    assert "EmailNotification: failed to send a message: ConnectionRefusedError" in caplog.text


def test_a_server_that_says_nothing_does_not_hold_up_the_run(make, batches, monkeypatch, caplog):
    monkeypatch.setattr(notification, "_PATIENCE_S", 0.05)
    done = threading.Event()
    before = set(threading.enumerate())

    class Silent(socketserver.BaseRequestHandler):
        def handle(self):
            done.wait(60)

    server = socketserver.TCPServer(("127.0.0.1", 0), Silent)
    for _ in serving(server):
        with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
            run(make(mailing(server)), batches)
        done.set()
    assert "EmailNotification: a message was not sent within" in caplog.text
    for thread in set(threading.enumerate()) - before:
        thread.join(60)  # it logs the end of a connection: in this test, not in the next


def test_an_endpoint_gets_it_in_place_of_a_server(make, batches, web_server, monkeypatch):
    monkeypatch.setenv("CEREBRAS_NOTIFICATION_ENDPOINT", web_server.url)
    run(make(EmailNotification("a@x.org")), batches)
    ((_, post),) = web_server.posts
    assert post["mailto"] == ["a@x.org"]
    assert post["mailfrom"] is None
    assert post["subject"] == "Training notification: Training ended at step 4"
    assert post["body"].startswith("Training ended at step 4.\nmodel_dir: ")


def test_the_sender_may_be_in_the_environment(make, batches, mail_server, monkeypatch):
    monkeypatch.setenv("CEREBRAS_NOTIFICATION_MAILFROM", "other@x.org")
    run(make(mailing(mail_server, mailfrom=None)), batches)
    assert "From: other@x.org" in mail_server.mails[0]


def test_without_a_sender_or_a_token_that_is_reported_and_nothing_is_sent(
    make, batches, mail_server, caplog
):
    callbacks = [mailing(mail_server, mailfrom=None), SlackNotification("general")]
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        run(make(*callbacks), batches)
    assert "no messages will be sent: there is no sender" in caplog.text
    assert f"the environment variable {TOKEN} is not set." in caplog.text
    assert mail_server.lines == []


@pytest.fixture
def slack(web_server, monkeypatch):
    monkeypatch.setattr(notification, "API", web_server.url)
    monkeypatch.setenv(TOKEN, "xoxb-secret")
    return web_server


def test_slack_gets_a_message_in_each_channel(make, batches, slack):
    run(make(SlackNotification(["#a", "b"])), batches)
    assert [given["channel"] for _, given in slack.posts] == ["#a", "b"]
    header, given = slack.posts[0]
    assert header == "Bearer xoxb-secret"
    assert given["text"].startswith("Training ended at step 4.")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"ok": False, "error": "channel_not_found"}), "a: channel_not_found"),
        ((500, {}), "HTTP Error 500"),
        ((302, {}), "HTTP Error 302"),
    ],
)
def test_what_slack_refuses_is_reported(make, batches, slack, caplog, answer, message):
    slack.answer = answer
    with caplog.at_level(logging.WARNING, "modelzoo_trainer"):
        run(make(SlackNotification("a")), batches)
    assert message in caplog.text
    assert "secret" not in caplog.text
    assert len(slack.posts) == 1


def test_a_stop_is_the_end_of_a_fit(make, batches, slack):
    class Stops(Callback):
        def on_step_boundary(self, trainer):
            raise StopTraining

    run(make(SlackNotification("a"), Stops(), loop=TrainingLoop(max_steps=9)), batches)
    assert slack.posts[0][1]["text"].startswith("Training ended at step 1.")


def test_only_the_first_process_tells(make, batches, slack, monkeypatch):
    trainer = make(SlackNotification("a"))
    monkeypatch.setattr(trainer.backend.comm, "rank", 1)
    callback = trainer.get_callback(SlackNotification)
    callback.on_fit_end(trainer, trainer.loop)
    trainer.close()
    assert slack.posts == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mailto": []}, "EmailNotification.mailto is .*; it must be one or more"),
        ({"mailto": 3}, "EmailNotification.mailto is 3; it must be a string or a list"),
        ({"mailto": "nobody"}, "EmailNotification: 'nobody' is not an e-mail address"),
        ({"mailto": ["a@x.org\nBcc: b@x.org"]}, "EmailNotification.mailto is"),
        ({"mailto": "a@x.org", "port": 0}, "EmailNotification.port: expected .*, got 0"),
        (
            {"mailto": "a@x.org", "subject": "a\nb"},
            r"EmailNotification.subject: .* one line.*, got 'a\\nb'",
        ),
        ({"mailto": "a@x.org", "subject": 5}, "EmailNotification.subject: .* one line.*, got 5"),
        (
            {"mailto": "a@x.org", "server_name": ""},
            "EmailNotification.server_name: .* mail server, got ''",
        ),
        ({"mailto": "a@x.org", "mailfrom": 5}, "EmailNotification: 5 is not an e-mail address"),
        (
            {"mailto": "a@x.org", "notification_endpoint": "http://["},
            r"notification_endpoint: expected an http or https address or null, got 'http://\['",
        ),
        (
            {"mailto": "a@x.org", "notification_endpoint": "file:///etc/passwd"},
            "notification_endpoint: .* http or https .*, got 'file:///etc/passwd'",
        ),
    ],
)
def test_what_does_not_fit_a_mail_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EmailNotification(**arguments)


def test_what_is_no_channel_is_refused():
    with pytest.raises(ConfigError, match=r"SlackNotification.channels is 'a,'; it must be one"):
        SlackNotification("a,")


def test_an_endpoint_of_the_environment_that_is_none_is_reported(
    make, batches, monkeypatch, caplog
):
    monkeypatch.setenv("CEREBRAS_NOTIFICATION_ENDPOINT", "http://[")
    trainer = make(EmailNotification("you@x.org"))
    trainer.fit(batches)
    assert "CEREBRAS_NOTIFICATION_ENDPOINT is not an http" in caplog.text


def test_each_validation_that_fails_is_reported(make, batches, mail_server):
    error = ZeroDivisionError("as before")

    class Fails(Callback):
        def on_validate_batch_start(self, trainer, model, batch, batch_idx):
            raise error

    trainer = make(mailing(mail_server), Fails())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.validate(batches)
    trainer.close()
    assert len(mail_server.mails) == 2
