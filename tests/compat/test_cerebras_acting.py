"""The Model Zoo's callbacks that act on weights and batches, and those that write to people."""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, ValidationLoop, callbacks
from modelzoo_trainer.callbacks.selective_grad import outlier_mask
from modelzoo_trainer.tools import notification
from tests.doubles import (
    Interrupted,
    TinyModel,
    constant_batches,
    differing,
    tiny_batches,
    weights_of,
)
from tests.doubles import Scale as OneWeight

SIZE = "csx.performance.micro_batch_size"


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def test_c_selective_grad__trains_the_chosen_weights_alone(trainer_of):
    class Peaked(TinyModel):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = nn.Linear(3, 12), nn.Linear(12, 1)
            with torch.no_grad():
                self.hidden.weight[0] += 5

    chosen = callbacks.SelectiveGrad({"param_filter": "hidden.weight", "init_method": "outlier"})
    trainer = trainer_of(chosen, model=Peaked, optimizer=adamw, max_steps=3)
    before = weights_of(trainer)
    mask = outlier_mask(before["hidden.weight"])
    trainer.fit(tiny_batches())
    moved = weights_of(trainer)["hidden.weight"] != before["hidden.weight"]
    assert mask.any()
    assert torch.equal(moved, mask)


def test_c_lora__trains_the_adapters_alone(trainer_of):
    pytest.importorskip("peft")
    trainer = trainer_of(callbacks.Lora({"r": 2, "alpha": 4, "target_modules": ["Linear"]}))
    before = weights_of(trainer)
    adapters = {name for name in before if "lora_" in name}
    assert len(adapters) == 4
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == adapters
    trainer.fit(tiny_batches())
    after = weights_of(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert changed <= adapters


class Sizes(OneWeight):
    """Notes the sizes of what goes into it."""

    def __init__(self):
        super().__init__()
        self.sizes = {True: [], False: []}

    def forward(self, batch):
        self.sizes[self.training].append(len(batch))
        return super().forward(batch)


@pytest.fixture
def sizes(trainer_of):
    """A function from flags to the sizes of batches in training and in validation."""

    def run(*flags, loop=None):
        trainer = trainer_of(*flags, model=Sizes)
        trainer.fit(constant_batches(1))
        trainer.validate(constant_batches(1), loop=loop, ckpt_path=None)
        return trainer.model.sizes[True], trainer.model.sizes[False]

    return run


def test_c_global_flags__count_everywhere(sizes):
    assert sizes(callbacks.GlobalFlags(**{SIZE: 1})) == ([1, 1], [1, 1])


def test_c_scoped_train_flags__count_in_training(sizes):
    assert sizes(callbacks.ScopedTrainFlags(**{SIZE: 1})) == ([1, 1], [2])


def test_c_scoped_validate_flags__count_in_validations(sizes):
    assert sizes(callbacks.ScopedValidateFlags(**{SIZE: 1})) == ([2], [1, 1])


def test_c_scoped_train_flags__are_put_back_after_an_error(trainer_of):
    class Fails(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            seen.append(torch.backends.cudnn.benchmark)
            raise Interrupted

    seen = []
    before = torch.backends.cudnn.benchmark
    flags = callbacks.ScopedTrainFlags(**{"torch.backends.cudnn.benchmark": not before})
    with pytest.raises(Interrupted):
        trainer_of(flags, Fails()).fit(tiny_batches())
    assert seen == [not before]
    assert torch.backends.cudnn.benchmark == before


HARNESSES = {"eleuther_eval_harness": callbacks.ScopedEleutherEvalHarnessFlags}
HARNESSES["bigcode_eval_harness"] = callbacks.ScopedBigCodeEvalHarnessFlags


def check_harness(sizes, hook):
    flags = HARNESSES[hook](**{SIZE: 1})
    assert sizes(flags) == ([2], [2])
    assert sizes(flags, loop=ValidationLoop(hook=hook)) == ([2], [1, 1])


def test_c_scoped_eleuther_eval_harness_flags__count_in_its_loops(sizes):
    check_harness(sizes, "eleuther_eval_harness")


def test_c_scoped_big_code_eval_harness_flags__count_in_its_loops(sizes):
    check_harness(sizes, "bigcode_eval_harness")


def test_c_debug_args_path__changes_nothing_and_says_so(trainer_of, tmp_path):
    debug = callbacks.DebugArgsPath(str(tmp_path / "none.pb"))
    trainer = trainer_of(debug, num_steps=1)
    trainer.fit(tiny_batches())
    assert trainer.global_step == 1
    assert debug.notes == ["debug_args_path: no effect on this hardware; the file is not read."]


def test_c_weight_compression__changes_nothing_and_says_so(trainer_of, tmp_path):
    compression = callbacks.WeightCompression({"format": "int8", "param_filter": "*"})
    plain, trainer = trainer_of(), trainer_of(compression, model_dir=tmp_path / "compressed")
    for one in (plain, trainer):
        one.fit(tiny_batches())
    assert differing(weights_of(plain), weights_of(trainer)) == []
    assert compression.notes == [
        "compressions: no effect on this hardware; weights stay as they are."
    ]
    with pytest.raises(ValueError, match="format"):
        callbacks.WeightCompression({"param_filter": "*"})


# ---- messages


class Mailbox(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"220 ready\r\n")
        while line := self.rfile.readline().strip():
            if line.upper() == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                mail = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.got.append(mail.decode())
            self.wfile.write(b"250 ok\r\n")


class Web(BaseHTTPRequestHandler):
    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.headers.get("Authorization"), json.loads(content)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"ok": true}')

    def log_message(self, *args):
        pass


@pytest.fixture(params=[Mailbox, Web])
def server(request, monkeypatch):
    """A server that keeps what it gets; tests say which kind."""
    for name in ("NOTIFICATION_PASSWORD", "NOTIFICATION_ENDPOINT", "SLACK_BOT_TOKEN"):
        monkeypatch.delenv(f"CEREBRAS_{name}", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    kind = socketserver.TCPServer if request.param is Mailbox else HTTPServer
    with kind(("127.0.0.1", 0), request.param) as made:
        made.got = []
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


class FailsInTraining(Callback):
    def on_train_step_end(self, trainer, model, outputs, batch):
        raise Interrupted("one over none")


@pytest.mark.parametrize("server", [Mailbox], indirect=True)
def test_c_email_notification__mails_the_end_and_an_error(trainer_of, server, tmp_path):
    where = {"server_name": "127.0.0.1", "port": server.server_address[1]}
    mail = callbacks.EmailNotification("a@x.org", "b@x.org", subject="Ours", **where)
    trainer = trainer_of(mail)
    trainer.fit(tiny_batches())
    trainer.close()
    failing = trainer_of(mail, FailsInTraining(), model_dir=tmp_path / "failing")
    with pytest.raises(Interrupted):
        failing.fit(tiny_batches())
    failing.close()
    assert "Subject: Ours: Training ended at step 3" in server.got[0]
    assert "Subject: Ours: Training failed at step" in server.got[1]
    assert "one over none" in server.got[1]
    assert len(server.got) == 2


@pytest.mark.parametrize("server", [Web], indirect=True)
def test_c_slack_notification__writes_to_each_channel(trainer_of, server, monkeypatch):
    monkeypatch.setenv("CEREBRAS_SLACK_BOT_TOKEN", "token")
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    monkeypatch.setattr(notification, "API", url)
    trainer = trainer_of(callbacks.SlackNotification(["runs", "team"]))
    assert server.got == []
    trainer.fit(tiny_batches())
    trainer.close()
    assert [given["channel"] for _, given in server.got] == ["runs", "team"]
    assert all("token" in secret for secret, _ in server.got)
    assert all("Training ended at step 3" in given["text"] for _, given in server.got)
