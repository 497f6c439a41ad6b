import json
import os
import platform

import numpy as np
import pytest

from modelzoo_trainer.checkpointing import save
from modelzoo_trainer.errors import ConfigError
from tests.tools.report.run_lines import losses


def event(kind, time, step=0, /, **facts):
    return {"time": 1_700_000_000.0 + time, "event": kind, "step": step, **facts}


def test_metrics_alone_are_enough(tmp_path, read):
    run = tmp_path / "foreign"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 5, "loss": 1.0}\n')
    (found,) = read(run)
    assert found.metrics.series["loss"].values.tolist() == [2, 1]
    assert (found.name, found.state, found.last_step) == ("foreign", "unknown", 5)
    assert any("no times" in note for note in found.notes)


def test_a_file_of_metrics_can_be_given(tmp_path, read):
    path = tmp_path / "other.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    (found,) = read(path)
    assert (found.name, found.last_step, found.checkpoints) == ("other.jsonl", 1, [])


def test_broken_lines_are_counted_in_a_note(write_run, read):
    (found,) = read(write_run(lines=[*losses(3), "{", '{"loss": 1}', *losses(5)[3:]]))
    (note,) = [note for note in found.notes if "Skipped" in note]
    assert "2 of 7 lines" in note


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, ["not the folder of a run", "metrics.jsonl"]),
        ({"logs/1/run.log": "text"}, ["run without metrics.jsonl", "JsonlLogger"]),
        ({"checkpoint_5/manifest.json": "{}"}, ["run without metrics.jsonl", "JsonlLogger"]),
    ],
    ids=["no run", "logs", "checkpoints"],
)
def test_a_folder_without_metrics_is_refused_with_what_to_do(files, told, tmp_path, read):
    (tmp_path / "run").mkdir()
    for name, text in files.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(tmp_path / "run")
    assert all(word in str(error.value) for word in [*told, str(tmp_path / "run")])


def test_a_folder_that_does_not_exist_is_refused(tmp_path, read):
    with pytest.raises(ConfigError, match=r"none.*does not exist"):
        read(tmp_path / "none")


@pytest.mark.parametrize(("lines", "word"), [(None, "missing"), ([], "empty")])
def test_a_run_without_metrics_says_why(lines, word, write_run, read):
    memory = event("memory", 1, peak_bytes=2**30)
    (found,) = read(write_run(lines=lines, events=[event("start", 0), memory]))
    (note,) = found.notes
    assert all(one in note for one in ("metrics.jsonl", word, "JsonlLogger"))


@pytest.mark.parametrize("text", ["2026-01-01 INFO: a\n2026-01-01 INFO: b\n", "text", '{"a": 1}'])
def test_a_file_without_a_usable_line_is_refused(text, tmp_path, read):
    path = tmp_path / "run.log"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.log.*none of its \d lines.*step"):
        read(path)


@pytest.mark.parametrize("text", ["", '{"step": 1, "lo', '{\n{"step": 1, "loss": 1}\n'])
def test_a_file_that_may_become_metrics_is_shown(text, tmp_path, read):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    (found,) = read(path)
    assert found.notes


def test_a_run_whose_process_is_starting_is_shown(write_run, read):
    holder = {"pid": os.getpid(), "host": platform.node()}
    (found,) = read(write_run(files={".lock": json.dumps(holder)}))
    (note,) = found.notes
    assert (found.state, "metrics.jsonl is missing" in note) == ("running", True)


@pytest.mark.parametrize(
    ("last", "holder", "state"),
    [
        ([event("end", 9, 5, outcome="finished")], None, "finished"),
        ([event("end", 9, 5, outcome="stopped", cause="SIGTERM")], None, "stopped"),
        ([event("end", 9, 5, outcome="failed", cause="ValueError: x")], None, "failed"),
        ([event("end", 9, 5, outcome="finished"), event("start", 10, 5)], None, "died"),
        ([], {"pid": os.getpid(), "host": platform.node()}, "running"),
        ([], {"pid": 2**22 + 5, "host": platform.node()}, "died"),
        ([], {"pid": 1, "host": "another host"}, "running"),
        ([], "broken", "died"),
    ],
)
def test_the_state_of_a_run(last, holder, state, write_run, read):
    files = {} if holder is None else {".lock": json.dumps(holder)}
    events = [event("start", 0), event("train_start", 1), *last]
    (found,) = read(write_run(lines=losses(3), events=events, files=files))
    assert found.state == state


def test_a_validation_after_a_failure_does_not_make_the_run_finished(write_run, read):
    events = [event("start", 0, kind="fit"), event("end", 9, 5, outcome="failed")]
    run = write_run(lines=losses(3), events=events)
    second = run / "logs" / "20260102_000000"
    second.mkdir()
    later = [event("start", 99, kind="validate"), event("end", 99, outcome="finished")]
    (second / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in later))
    (found,) = read(run)
    assert found.state == "failed"


def test_settings_are_those_of_the_newest_session(write_run, read):
    run = write_run(
        lines=losses(1),
        params="# command: run.py -p x.yaml\n# git commit: abc\ntrainer:\n  init: {seed: 1}\n",
    )
    second = run / "logs" / "20260102_000000"
    second.mkdir()
    (second / "params.yaml").write_text("trainer:\n  init: {seed: 2, betas: [0.9, 0.99]}\n")
    (found,) = read(run)
    assert found.settings == {"trainer.init.seed": "2", "trainer.init.betas": "[0.9, 0.99]"}


def later_session(run, events, **files):
    folder = run / "logs" / "20260102_000000"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


FIT = [event("start", 0, kind="fit"), event("train_start", 1)]
VALIDATION = [event("start", 99, kind="validate"), event("end", 99, outcome="finished")]
PREDICTION = []  # has no events


@pytest.mark.parametrize("later", [VALIDATION, PREDICTION], ids=["validation", "prediction"])
def test_settings_and_environment_are_those_of_the_newest_fit(later, write_run, read):
    facts = {"environment": {"command": "train"}, "sizes": {"data": {"batches_per_epoch": 45}}}
    run = write_run(
        lines=losses(1),
        events=FIT,
        params="trainer: {weight_decay: 0.01}\n",
        files={"logs/20260101_000000/run.json": json.dumps(facts)},
    )
    facts = {"environment": {"command": "validate"}, "sizes": {"data": {"batches_per_epoch": 7}}}
    params = "trainer: {weight_decay: 0.5}\n"
    later_session(run, later, params_yaml=params, run_json=json.dumps(facts))
    (found,) = read(run)
    assert found.settings == {"trainer.weight_decay": "0.01", "data.batches_per_epoch": "45"}
    assert found.environment == {"command": "train"}


def test_settings_of_a_run_without_a_fit_are_those_of_the_newest_validation(write_run, read):
    run = write_run(lines=losses(1), events=[event("start", 0, kind="validate")], params="a: 1\n")
    later_session(run, VALIDATION, params_yaml="a: 2\n")
    (found,) = read(run)
    assert found.settings == {"a": "2"}


def test_warnings_of_evaluations_come_last_with_their_folder(write_run, read, page_of):
    log = "2026-01-01 00:00:00,001 WARNING: {}\n"
    files = {"logs/20260101_000000/run.log": log.format("both") + log.format("of the fit")}
    run = write_run(lines=losses(1), events=FIT, files=files)
    later_session(run, VALIDATION, run_log=log.format("both") + log.format("of the validation"))
    (found,) = read(run)
    assert [(one.text, one.folder) for one in found.warnings] == [
        ("both", ""),
        ("of the fit", ""),
        ("of the validation", "logs/20260102_000000"),
    ]
    assert page_of(run).count("from validate, test or predict: logs/20260102_000000") == 1


def test_the_sizes_of_the_data_are_settings_of_every_run(write_run, read):
    sizes = {"data": {"batches_per_epoch": 45}, "validation": {"batches": [3, 4]}}
    run = write_run(
        lines=losses(1),
        params="trainer: {a: 1}\n",
        files={
            "logs/20260101_000000/run.json": json.dumps({"environment": {}, "sizes": sizes}),
            "logs/20260102_000000/run.json": '{"environment": {}}',  # of a validation
        },
    )
    (found,) = read(run)
    assert found.settings == {
        "trainer.a": "1",
        "data.batches_per_epoch": "45",
        "validation.batches": "[3, 4]",
    }


def test_the_head_of_the_configuration_is_environment(write_run, read):
    params = "# command: run.py -p x.yaml\n# versions: Python 3\n# git commit: abc\ntrainer: {}\n"
    (found,) = read(write_run(lines=losses(1), params=params))
    assert found.environment == {
        "command": "run.py -p x.yaml",
        "versions": "Python 3",
        "git commit": "abc",
    }


def test_broken_files_of_a_session_are_noted(write_run, read):
    run = write_run(
        lines=losses(1),
        events=["{", event("start", 0)],
        params="a: [",
        files={"logs/20260101_000000/run.json": "{"},
    )
    (found,) = read(run)
    told = " ".join(found.notes)
    assert all(
        word in told for word in ("1 unreadable lines of events.jsonl", "params.yaml", "run.json")
    )


def test_secrets_are_not_shown(write_run, read):
    params = "# command: run.py --token=hf_abcdefghijklmnopqrstuvwxyz0123456789\n"
    params += "trainer:\n  init: {api_key: abcdef123456, url: 'http://me:word@host/x'}\n"
    cause = "ValueError: https://me:word@host refused"
    run = write_run(
        lines=losses(1),
        params=params,
        events=[event("start", 0), event("end", 1, outcome="failed", cause=cause)],
    )
    (found,) = read(run)
    shown = f"{found.settings} {found.environment} {found.cause}"
    assert not any(secret in shown for secret in ("abcdef", "word@"))
    assert "trainer.init.url" in found.settings


def test_memory_is_a_metric_in_gib(write_run, read):
    events = [
        event("start", 0),
        event("memory", 1, 1, host_peak_bytes=2**30, device_peak_bytes=3 * 2**30),
        event("memory", 11, 9, host_peak_bytes=2 * 2**30, device_peak_bytes=3 * 2**30),
    ]
    (found,) = read(write_run(lines=losses(1), events=events))
    series = found.metrics.series["memory/host_peak_gib"]
    assert (series.steps.tolist(), series.values.tolist()) == ([1, 9], [1, 2])
    assert found.metrics.series["memory/device_peak_gib"].values.tolist() == [3, 3]


def test_epochs_come_from_events_and_the_length_of_an_epoch(write_run, read):
    events = [
        event("start", 0),
        event("train_start", 1, 0, steps_per_epoch=4),
        event("epoch", 2, 4, epoch=1),
    ]
    (found,) = read(write_run(lines=losses(6), events=events))
    assert found.epochs() == [(0, 0), (4, 1), (6, 1.5)]


def test_a_metric_called_epoch_is_the_epoch(write_run, read):
    lines = [{"step": step, "epoch": step / 2, "loss": 1.0} for step in (1, 2, 3)]
    (found,) = read(write_run(lines=lines))
    assert found.epochs() == [(1, 0.5), (2, 1), (3, 1.5)]


def test_metrics_of_earlier_runs_are_named(write_run, read):
    (found,) = read(write_run(lines=losses(1), files={"metrics-20250101-000000.jsonl": "x"}))
    assert any("metrics-20250101-000000.jsonl" in note for note in found.notes)


def test_a_run_is_read_once_and_at_most_twenty_are(write_run, read, tmp_path):
    runs = [write_run(f"run_{idx}", lines=losses(1)) for idx in range(21)]
    assert len(read(runs[0], runs[0] / ".", runs[1])) == 2
    assert len(read(*runs[:20])) == 20
    with pytest.raises(ConfigError, match=r"21 runs.*20"):
        read(*runs)


def test_all_folders_that_are_no_runs_are_named(write_run, read, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError) as error:
        read(tmp_path / "a", write_run(lines=losses(1)), tmp_path / "b")
    assert [str(tmp_path / name) in str(error.value) for name in "ab"] == [True, True]


def test_runs_of_different_lengths_stand_side_by_side(write_run, read):
    long, short = read(write_run("long", losses(200)), write_run("short", losses(3)))
    assert (long.last_step, short.last_step) == (200, 3)
    assert np.isfinite(long.start)


def test_a_checkpoint_was_written_when_its_event_says(write_run, read):
    events = [
        event("train_start", 0),
        event("save", 5, 5, name="checkpoint_5", seconds=2.0),
        event("save", 9, 9, name="checkpoint_8", seconds=2.0),
        event("save", 9, 9, name=["odd"]),
    ]
    run = write_run(lines=losses(1), events=events)
    for step in (5, 8):
        save(run / f"checkpoint_{step}", {"x": 1}, step=step)
        os.utime(run / f"checkpoint_{step}" / "manifest.json", (1_800_000_000,) * 2)
    (found,) = read(run)
    assert [(one.step, one.written.timestamp()) for one in found.checkpoints] == [
        (5, 1_700_000_007.0),
        (8, 1_800_000_000),
    ]
