"""Weights & Biases, offline: what is in its files is what would be sent."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, RollBack
from modelzoo_trainer.loggers.wandb_logger import WandbLogger

pytestmark = pytest.mark.slow

LOGGER = "modelzoo_trainer.wandb"
_BLOCK = 1 << 15


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    wandb.teardown()  # it keeps the settings of the process's first run
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb replaces it, for good


def payloads(content):
    """The records of a log of blocks: each piece has a checksum, a length and a kind."""
    place, parts = 7, []
    while place + 7 <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if place + 7 + length > len(content):  # is being written
            return
        parts.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def parsed(path):
    from wandb.proto import wandb_internal_pb2

    return [
        wandb_internal_pb2.Record.FromString(payload) for payload in payloads(path.read_bytes())
    ]


def folders_of(folder):
    return sorted((Path(folder) / "wandb").glob("offline-run-*"))


def records(folder, num_killed=0):
    """All records, in order; the library's process writes the last ones after a run's end."""
    for number, each in enumerate(folders_of(folder)):
        is_killed = number < num_killed  # perhaps before its file was there
        found = records_in(each)
        end = time.monotonic() + 60
        while not (is_killed or any(r.HasField("exit") for r in found)):
            assert time.monotonic() < end, f"{each} has no end"
            time.sleep(0.02)
            found = records_in(each)
        yield from found


def records_in(folder):
    return [record for path in folder.glob("*.wandb") for record in parsed(path)]


def history(folder, num_killed=0):
    """(step, values) of each point, over all processes in order."""
    for record in records(folder, num_killed):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = items.pop("_step")
            yield step, {k: v for k, v in items.items() if not k.startswith("_")}


def steps_of(folder, num_killed=0):
    return [step for step, values in history(folder, num_killed) if "loss" in values]


def ids_of(folder, num_killed=0):
    return {r.run.run_id for r in records(folder, num_killed) if r.HasField("run")}


class Losses(Callback):
    def __init__(self):
        self.lines = []

    def on_metrics(self, trainer, metrics, step):
        if "loss" in metrics:
            self.lines.append((step, metrics["loss"]))


def config_of(record):
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.update}


def configs(folder):
    """What each run's config came to, over all that was sent of it."""
    found = {}
    for record in records(folder):
        if record.HasField("run"):
            found |= config_of(record.run.config)
        elif record.HasField("config"):
            found |= config_of(record.config)
    return found


class Extra(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.log_metrics(
            text="some words",
            weight=model.head.weight.detach().clone(),
            one=torch.ones(1),
            table={"columns": ["a", "b"], "data": [[1, 2]]},
            nothing=object(),
        )


@pytest.mark.slow
def test_numbers_are_points_at_their_steps(make, batches):
    losses = Losses()
    trainer = make(WandbLogger(project="p"), callbacks=[losses])
    trainer.fit(batches, batches[:1])
    trainer.close()
    found = list(history(trainer.model_dir))
    assert [(step, values["loss"]) for step, values in found] == losses.lines
    assert found[-1][1]["validate_0/loss"] > 0


@pytest.mark.slow
def test_other_values_have_their_kinds(make, batches):
    trainer = make(WandbLogger(), callbacks=[Extra()], max_steps=1)
    trainer.fit(batches)
    trainer.close()
    ((_, values),) = history(trainer.model_dir)
    assert values["one"] == 1
    assert any(name.startswith("weight") for name in values)
    assert any(name.startswith("table") for name in values)
    assert not any(name.startswith(("text", "nothing")) for name in values)
    summaries = [r.summary for r in records(trainer.model_dir) if r.HasField("summary")]
    written = {i.key: i.value_json for summary in summaries for i in summary.update}
    assert written["text"] == '"some words"'


def test_the_arguments_reach_the_run(make, batches):
    logger = WandbLogger("proj", "grp", "id1", "a name", "kind", ["x", "y"], entity="us")
    trainer = make(logger, max_steps=1)
    trainer.fit(batches)
    trainer.close()
    run = next(r.run for r in records(trainer.model_dir) if r.HasField("run"))
    assert (run.project, run.run_group, run.run_id) == ("proj", "grp", "id1")
    assert (run.display_name, run.job_type, list(run.tags)) == ("a name", "kind", ["x", "y"])
    assert run.entity == "us"


def test_a_run_that_resumes_goes_on_and_sends_no_step_twice(make, batches):
    first = make(WandbLogger(), checkpoint=Checkpoint(steps=2), max_steps=3)
    first.fit(batches)
    first.close()
    second = make(WandbLogger(), checkpoint=Checkpoint(steps=2), max_steps=5)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    second.close()
    assert len(ids_of(second.model_dir)) == 1
    assert steps_of(second.model_dir) == [1, 2, 3, 4, 5]


def test_never_begins_another_run(make, batches):
    first = make(WandbLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.close()
    second = make(WandbLogger(resume="never"), max_steps=3)
    second.fit(batches)
    second.close()
    assert len(ids_of(second.model_dir)) == 2
    assert sorted(steps_of(second.model_dir)) == [1, 2, 3]


def test_another_trainings_checkpoint_does_not_bring_its_run(make, batches, tmp_path):
    first = make(WandbLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.close()
    second = make(WandbLogger(), model_dir=tmp_path / "other", max_steps=3)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    second.close()
    assert not ids_of(first.model_dir) & ids_of(second.model_dir)
    assert steps_of(second.model_dir) == [3]


def test_a_run_that_goes_back_sends_no_step_twice(make, batches):
    class GoesBack(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 3 and not trainer.data.skipped:
                raise RollBack("bad", step=3, batches=[(0, 2)], cause=ValueError())

    trainer = make(WandbLogger(), callbacks=[GoesBack()], checkpoint=Checkpoint(steps=1))
    trainer.fit(batches)
    trainer.close()
    assert steps_of(trainer.model_dir) == [1, 2, 3, 4]


def test_settings_are_shown_with_the_run(make, batches):
    logger = WandbLogger()
    logger.take_config({"seed": 1, "init": {"lr": 0.5, "names": ["a", "b"]}})
    first = make(logger, checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.close()
    assert configs(first.model_dir).items() >= {
        "seed": 1, "init": {"lr": 0.5, "names": ["a", "b"]}
    }.items()  # fmt: skip
    logger = WandbLogger()
    logger.take_config({"seed": 2})
    second = make(logger, checkpoint=Checkpoint(steps=2), max_steps=4)
    second.fit(batches)
    second.close()
    assert configs(first.model_dir)["seed"] == 2
    assert steps_of(first.model_dir) == [1, 2, 3, 4]


def test_must_needs_a_run(make, batches):
    with pytest.raises(ConfigError, match=r"resume is 'must', but there is no run to resume"):
        make(WandbLogger(resume="must")).fit(batches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"resume": "yes"},
            "WandbLogger.resume: .*'never', 'allow', 'auto' or 'must', got 'yes'",
        ),
        ({"tags": "one"}, "WandbLogger.tags: expected a list of words or null, got 'one'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        WandbLogger(**arguments)


def test_without_the_library_the_extra_is_named(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'modelzoo-trainer\[wandb\]'"):
        make(WandbLogger())


def test_a_service_that_is_not_there_is_told_once(make, batches, monkeypatch, caplog):
    import wandb

    def refuse(**settings):
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", refuse)
    trainer = make(WandbLogger())
    trainer.fit(batches)
    assert trainer.global_step == 4
    told = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert told == ["WandbLogger failed to start; metrics are not sent: CommError: no network"]


KILLED = """
import sys, time
import torch
from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.loggers.wandb_logger import WandbLogger

class Net(torch.nn.Linear):
    def forward(self, batch):
        return {"loss": super().forward(batch).square().mean()}

class Kill(Callback):
    def on_step_boundary(self, trainer):
        if trainer.global_step == 6:
            time.sleep(600)

Trainer(
    device="cpu", model_dir=sys.argv[1], model=lambda: Net(2, 1), seed=0,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    loop=TrainingLoop(max_steps=8), loggers=[WandbLogger()],
    checkpoint=Checkpoint(steps=4), callbacks=[Kill()] if sys.argv[2] == "kill" else [],
).fit([torch.ones(2, 2)] * 10)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_loses_the_last_moment_and_goes_on(tmp_path):
    folder = tmp_path / "run"
    # Without it each has a service of its own, which ends with it, and not that of this process.
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    own["WANDB__TRANSACTION_LOG_FLUSH_INTERVAL"] = "3600"  # in place of the library's 15
    with subprocess.Popen([sys.executable, "-c", KILLED, folder, "kill"], env=own) as process:
        end = time.monotonic() + 180
        while steps_of(folder, num_killed=1)[:5] != [1, 2, 3, 4, 5]:
            if process.poll() is not None or time.monotonic() > end:
                break
            time.sleep(0.05)
        process.kill()
    assert process.returncode == -9
    assert steps_of(folder, num_killed=1)[:5] == [1, 2, 3, 4, 5]
    subprocess.run([sys.executable, "-c", KILLED, folder, "on"], check=True, env=own)
    found = steps_of(folder, num_killed=1)
    assert found == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(ids_of(folder, num_killed=1)) == 1
