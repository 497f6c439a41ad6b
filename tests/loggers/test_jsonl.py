import csv
import json
import math
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    RollBack,
    TrainingLoop,
    ValidationCallback,
    checkpointing,
)
from modelzoo_trainer.loggers import CSVLogger, JsonlLogger
from modelzoo_trainer.loggers.file_logger import cut_back, cut_to, mark, put_aside
from modelzoo_trainer.loggers.jsonl import to_lines


def read(path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(path):
    return [record["step"] for record in read(path)]


def test_each_delivery_is_a_line_with_its_step_and_time(make, batches):
    trainer = make(JsonlLogger(), log_steps=2)
    trainer.fit(batches, batches[:2])
    records = read(trainer.model_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == [2, 4, 4]
    assert list(records[0])[:2] == ["step", "time"]
    assert records[0]["loss"] > 0
    assert records[2]["validate_0/loss"] > 0
    assert records[0]["time"] <= records[1]["time"]


def test_the_file_can_be_chosen(make, batches, tmp_path):
    make(JsonlLogger(path=tmp_path / "new" / "figures.jsonl")).fit(batches)
    assert steps(tmp_path / "new" / "figures.jsonl") == [1, 2, 3, 4]


def test_a_second_fit_appends(make, batches):
    trainer = make(JsonlLogger(), loop=TrainingLoop(num_steps=2))
    trainer.fit(batches)
    trainer.fit(batches)
    assert steps(trainer.model_dir / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_validation_alone_is_in_the_file_when_it_ends(make, batches):
    trainer = make(JsonlLogger())
    trainer.validate(batches[:2])
    assert read(trainer.model_dir / "metrics.jsonl")[0]["validate_0/loss"] > 0


# ---- values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (torch.tensor([[1.0, math.nan], [2.0, 3.0]]), [[1.0, "nan"], [2.0, 3.0]]),
        (torch.arange(1000), list(range(1000))),
        (torch.tensor(2.5).double().numpy(), 2.5),
        ("text", "text"),
        (None, None),
        ((1, 2.5), [1, 2.5]),
    ],
    ids=str,
)
def test_every_value_is_valid_json(value, expected):
    record = json.loads(to_lines([({"name": value, "loss": 1.5}, 3, 7.0)]))
    assert record == {"step": 3, "time": 7.0, "name": expected, "loss": 1.5}


@pytest.mark.parametrize("value", [torch.zeros(1001), object()], ids=["large", "object"])
def test_what_cannot_be_a_value_is_left_out(value):
    assert json.loads(to_lines([({"name": value, "loss": 1.5}, 3, 7.0)])) == {
        "step": 3,
        "time": 7.0,
        "loss": 1.5,
    }


@pytest.mark.parametrize(
    "value",
    [2.5, "a}, {b", [{"a": 1}, {"a": 2}], math.nan, object()],
    ids=["number", "text", "dicts", "nan", "object"],
)
def test_lines_that_are_written_together_are_those_written_one_by_one(value):
    lines = [({"loss": 1.5}, 1, 7.0), ({"loss": 1.25, "name": value}, 2, 8.0), ({}, 3, 9.0)]
    assert to_lines(lines) == "".join(to_lines([line]) for line in lines)
    assert [json.loads(line)["step"] for line in to_lines(lines).splitlines()] == [1, 2, 3]


def test_a_metric_called_step_does_not_hide_the_step():
    record = json.loads(to_lines([({"step": 9.0, "time": 8.0}, 3, 7.0)]))
    assert record == {"step": 3, "time": 7.0, "step_": 9.0, "time_": 8.0}


# ---- resuming


def test_a_run_that_resumes_removes_the_steps_that_it_takes_again(make, batches):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    first.fit(batches)
    second = make(JsonlLogger(), max_steps=6)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    path = second.model_dir / "metrics.jsonl"
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert not list(path.parent.glob(".*.new"))


def test_a_validation_of_an_older_checkpoint_removes_nothing(make, batches):
    trainer = make(JsonlLogger(), checkpoint=Checkpoint(steps=2))
    trainer.fit(batches)
    trainer.validate_all(batches[:1], ckpt_paths=trainer.model_dir / "checkpoint_2")
    assert steps(trainer.model_dir / "metrics.jsonl") == [1, 2, 3, 4, 2]


class Crash(Exception):
    pass


class CrashAt(Callback):
    """Raises when a step has been taken, or after the validation at one."""

    def __init__(self, step, after_validation=False):
        self.step, self.after_validation = step, after_validation

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step and not self.after_validation:
            raise Crash

    def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
        if trainer.global_step == self.step and self.after_validation:
            raise Crash


def without_times(path):
    return re.sub(rb'"time": [0-9.]+', b"", path.read_bytes())


def settings(**more):
    loop = TrainingLoop(max_steps=9, eval_frequency=3)
    return {"loop": loop, "checkpoint": Checkpoint(steps=3), **more}


@pytest.mark.slow
@pytest.mark.parametrize("after_validation", [False, True])
@pytest.mark.parametrize("crashes", [[3], [4], [6], [8], [3, 5, 6, 8]], ids=str)
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_run_that_resumes_leaves_the_file_of_one_that_was_not_broken(
    make, batches, tmp_path, crashes, after_validation, device
):
    whole = make(JsonlLogger(), **settings(model_dir=tmp_path / "whole", device=device))
    whole.fit(batches, batches[:2])
    whole.close()
    for step in crashes:
        crash = CrashAt(step, after_validation and step % 3 == 0)
        trainer = make(JsonlLogger(), **settings(callbacks=[crash], device=device))
        with pytest.raises(Crash):
            trainer.fit(batches, batches[:2])
        trainer.close()
    trainer = make(JsonlLogger(), **settings(device=device))
    trainer.fit(batches, batches[:2])
    trainer.close()
    expected = without_times(tmp_path / "whole" / "metrics.jsonl")
    assert expected.count(b"validate_0") == 3
    assert without_times(trainer.model_dir / "metrics.jsonl") == expected


class GoBack(Callback):
    """Goes back to the last checkpoint, once."""

    def __init__(self, step):
        self.step = step

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step:
            self.step = None
            found = RuntimeError("nowhere to go back to")
            raise RollBack("bad", step=trainer.global_step, batches=[], cause=found)


@pytest.mark.parametrize("step", [4, 5, 8])
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.slow_cases(every=4)
def test_a_run_that_goes_back_takes_its_lines_back(make, batches, tmp_path, step, device):
    whole = make(JsonlLogger(), **settings(model_dir=tmp_path / "whole", device=device))
    whole.fit(batches, batches[:2])
    whole.close()
    trainer = make(JsonlLogger(), **settings(callbacks=[GoBack(step)], device=device))
    trainer.fit(batches, batches[:2])
    trainer.close()
    expected = without_times(tmp_path / "whole" / "metrics.jsonl")
    assert without_times(trainer.model_dir / "metrics.jsonl") == expected


def test_the_file_is_cut_in_place(make, batches):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    first.fit(batches)
    first.close()
    path = first.model_dir / "metrics.jsonl"
    before = path.stat().st_ino
    second = make(JsonlLogger(), max_steps=6)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert path.stat().st_ino == before


def test_another_file_of_the_same_length_is_cut_by_its_steps(make, batches):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    first.fit(batches)
    first.close()
    path = first.model_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1', '"step": 7').replace("loss", "lost"))
    second = make(JsonlLogger(), max_steps=3)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    assert steps(path) == [2, 3]


def test_a_file_that_has_lost_its_end_keeps_what_is_left(make, batches):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=3), max_steps=4)
    first.fit(batches)
    first.close()
    path = first.model_dir / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0] + '{"step": 2, "ti')
    second = make(JsonlLogger(), max_steps=4)
    second.fit(batches, ckpt_path=first.model_dir / "checkpoint_3")
    assert steps(path) == [1, 4]


def test_a_checkpoint_without_its_state_cuts_by_steps(make, batches):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    first.fit(batches)
    first.close()
    state = checkpointing.load(first.model_dir / "checkpoint_2")
    del state["callbacks"]["JsonlLogger"]
    checkpointing.save(first.model_dir / "old_2", state, step=2)
    second = make(JsonlLogger(), max_steps=3)
    second.fit(batches, ckpt_path=first.model_dir / "old_2")
    assert steps(first.model_dir / "metrics.jsonl") == [1, 2, 3]


def test_a_run_that_begins_with_anothers_checkpoint_keeps_to_its_own_file(make, batches, tmp_path):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    first.fit(batches)
    first.close()
    before = (first.model_dir / "metrics.jsonl").read_bytes()
    other = make(JsonlLogger(), max_steps=4, model_dir=tmp_path / "other")
    other.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    assert steps(other.model_dir / "metrics.jsonl") == [3, 4]
    assert (first.model_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("first", ["load", "validate", "both"])
@pytest.mark.slow_cases(every=4)
def test_a_fit_after_a_load_removes_the_steps_that_it_takes_again(make, batches, tmp_path, first):
    whole = make(JsonlLogger(), **settings(model_dir=tmp_path / "whole"))
    whole.fit(batches, batches[:2])
    whole.close()
    trainer = make(JsonlLogger(), **settings(callbacks=[CrashAt(8)]))
    with pytest.raises(Crash):
        trainer.fit(batches, batches[:2])
    trainer.close()
    trainer = make(JsonlLogger(), **settings())
    if first != "validate":
        trainer.load_checkpoint(trainer.model_dir / "checkpoint_6")
    if first != "load":
        trainer.validate(batches[:3])
    trainer.fit(batches, batches[:2])
    trainer.close()
    lines = without_times(trainer.model_dir / "metrics.jsonl").splitlines()
    expected = without_times(tmp_path / "whole" / "metrics.jsonl").splitlines()
    if first != "load":  # the line of the validation stays, where the run goes on
        own = lines.pop(7)
        assert own.startswith(b'{"step": 6, ')
        assert b"validate" in own
        assert own not in expected
    assert lines == expected


def test_results_of_tests_stay_in_the_file_of_a_run_that_resumes(make, batches):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    first = make(JsonlLogger(), callbacks=[CrashAt(3)], loop=loop, checkpoint=Checkpoint(steps=2))
    with pytest.raises(Crash):
        first.fit(batches, batches[:2])
    first.close()
    path = first.model_dir / "metrics.jsonl"
    for method in ("test", "validate"):
        other = make(JsonlLogger())
        getattr(other, method)(batches[:2], ckpt_path=first.model_dir / "checkpoint_2")
        other.close()
    resumed = make(JsonlLogger(), loop=loop)
    resumed.fit(batches, batches[:2])
    resumed.close()
    found = read(path)
    assert [line["step"] for line in found if "test/loss" in line] == [2]
    assert [line["step"] for line in found if "validate_0/loss" in line] == [2, 4]
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [JsonlLogger, CSVLogger])
def test_a_test_that_a_callback_repeats_is_written_once(make, batches, kind):
    class TestEachEpoch(Callback):
        def on_train_epoch_end(self, trainer, epoch):
            trainer.log_metrics(**{"test/score": 0.5 + epoch})

    settings = {"loop": TrainingLoop(num_epochs=2), "checkpoint": Checkpoint(steps=4)}
    first = make(kind(), callbacks=[TestEachEpoch(), CrashAt(6)], **settings)
    with pytest.raises(Crash):
        first.fit(batches[:4])
    first.close()
    second = make(kind(), callbacks=[TestEachEpoch()], **settings)
    second.fit(batches[:4])
    second.close()
    [path] = second.model_dir.glob("metrics.*")
    lines = path.read_text().splitlines()
    tests = [line for line in lines if "test/score" in line]
    if kind is CSVLogger:
        tests = [row for row in csv.DictReader(lines) if row["test/score"]]
    assert len(tests) == 2


def test_a_file_that_ends_with_tests_is_not_truncated(make, batches, caplog):
    caplog.set_level("INFO")
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.test(batches[:1])
    first.close()
    path = first.model_dir / "metrics.jsonl"
    before = path.read_bytes()
    assert b"test/loss" in before
    second = make(JsonlLogger(), max_steps=3)
    second.fit(batches)
    second.close()
    assert path.read_bytes().startswith(before)
    assert "Truncated" not in caplog.text


def test_what_is_no_line_of_a_test_is_removed(make, batches):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    first.close()
    path = first.model_dir / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "time": torn}\n7\n{"step": 2, "time": 1.0}\n')
        file.write('{"step": 2, "time": 1.0, "test/loss": 1.0, "loss": 1.0}\n')
        file.write('{"step": 3, "time": 1.0, "test/loss": 1.0}\n')
    make(JsonlLogger(), max_steps=3).fit(batches)
    assert steps(path) == [1, 2, 3]
    assert "test/loss" not in path.read_text()


def test_a_validation_of_a_fit_that_is_named_like_a_test_is_not_kept(make, batches):
    class Custom(ValidationCallback):
        name_scope, every_n_vals, num_validate_loops = "test", 1, 1

        def run_validation(self, trainer, loop_idx, is_last):
            trainer.log_metrics(score=1.0)

    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    settings = {"loop": loop, "checkpoint": Checkpoint(steps=2)}
    first = make(JsonlLogger(), callbacks=[Custom(), CrashAt(3)], **settings)
    with pytest.raises(Crash):
        first.fit(batches, batches[:2])
    first.close()
    second = make(JsonlLogger(), callbacks=[Custom()], **settings)
    second.fit(batches, batches[:2])
    second.close()
    found = read(second.model_dir / "metrics.jsonl")
    assert [line["step"] for line in found if "test/score" in line] == [2, 4]


def test_a_trainer_that_loads_an_older_checkpoint_takes_its_lines_back(make, batches):
    trainer = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    trainer.fit(batches)
    trainer.load_checkpoint(trainer.model_dir / "checkpoint_2")
    trainer.fit(batches)
    trainer.loop = TrainingLoop(num_steps=1)
    trainer.fit(batches)
    assert steps(trainer.model_dir / "metrics.jsonl") == [1, 2, 3, 4, 5]


# ---- beginning anew


@pytest.mark.parametrize(
    ("checkpoint", "ckpt_path"),
    [
        (Checkpoint(steps=2, checkpoint_name="ck_{step}"), ...),
        (Checkpoint(steps=2, checkpoint_root="{folder}/unmounted"), ...),
        (Checkpoint(autoload_last_checkpoint=False), ...),
        (Checkpoint(steps=2), None),
        (Checkpoint(steps=2), "{folder}/weights.safetensors"),
    ],
    ids=["other name", "other root", "no autoload", "told to", "weights"],
)
@pytest.mark.slow_cases(every=4)
def test_a_run_that_begins_anew_leaves_the_metrics_of_others(
    make, batches, caplog, checkpoint, ckpt_path
):
    first = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=4)
    first.fit(batches)
    first.close()
    save_file(dict(first.model.state_dict()), first.model_dir / "weights.safetensors")
    path = first.model_dir / "metrics.jsonl"
    before = path.read_bytes()
    if checkpoint.checkpoint_root is not None:
        checkpoint.checkpoint_root = first.model_dir / "unmounted"
    if isinstance(ckpt_path, str):
        ckpt_path = ckpt_path.format(folder=first.model_dir)
    make(JsonlLogger(), checkpoint=checkpoint, max_steps=1).fit(batches, ckpt_path=ckpt_path)
    assert steps(path) == [1]
    (aside,) = path.parent.glob("metrics-*.jsonl")
    assert aside.read_bytes() == before
    (told,) = [text for text in caplog.messages if "(step 0)" in text and aside.name in text]
    assert str(path) in told


def test_a_validation_before_a_run_stays_with_it(make, batches, caplog):
    trainer = make(JsonlLogger(), checkpoint=Checkpoint(steps=2), max_steps=2)
    trainer.validate(batches[:1])
    trainer.fit(batches)
    assert steps(trainer.model_dir / "metrics.jsonl") == [0, 1, 2]
    assert "begins at step 0" not in caplog.text


def test_only_attempts_that_logged_something_are_put_aside(make, batches):
    class Broken(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            raise Crash

    found = []
    for callback in (CrashAt(1), CrashAt(1), Broken(), Broken()):
        trainer = make(JsonlLogger(), checkpoint=Checkpoint(steps=5), callbacks=[callback])
        with pytest.raises(Crash):
            trainer.fit(batches)
        trainer.close()
        found.append([steps(path) for path in trainer.model_dir.glob("metrics-*.jsonl")])
    assert found == [[], [[1]], [[1], [1]], [[1], [1]]]


def test_a_file_is_put_aside_under_a_name_that_is_free(tmp_path):
    path = tmp_path / "m.jsonl"
    names = set()
    for content in ("one", "two", "three"):
        path.write_text(content)
        aside = put_aside(path)
        assert aside is not None
        assert aside.read_text() == content
        names.add(aside.name)
    assert len(names) == 3
    path.touch()
    assert put_aside(path) is None
    assert path.exists()


@pytest.mark.parametrize("content", ["", "{}\n", '{"step": 1, "time": 1.0}\n' * 5000])
def test_a_place_is_found_again(tmp_path, content):
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    place = mark(path)
    with path.open("a") as file:
        file.write('{"step": 2, "time": 1.0}\n')
    assert cut_to(path, place) == bool(content)
    assert mark(path)["num_bytes"] == (len(content) or 25)


def test_a_file_that_does_not_end_with_a_line_has_no_place(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1, "ti')
    assert mark(tmp_path / "m.jsonl")["num_bytes"] is None


def test_what_is_no_file_has_no_place_and_is_not_cut(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    place = mark(tmp_path / "pipe")
    assert place["num_bytes"] is None
    assert not cut_to(tmp_path / "pipe", {"num_bytes": 3, "tail": ""})
    assert mark(tmp_path / "missing")["num_bytes"] == 0


def test_lines_after_a_step_and_torn_ones_are_cut(tmp_path):
    path = tmp_path / "m.jsonl"
    ours = [to_lines([({"loss": 1.0}, step, 5.0)]) for step in (1, 2, 3, 2)]
    path.write_text("".join([*ours, '{"note": "mine"}\n', '{"step": 2, "ti']))
    cut_back(path, 2)
    assert path.read_text() == "".join([ours[0], ours[1], ours[3], '{"note": "mine"}\n'])


def test_a_file_with_nothing_to_cut_is_not_written_anew(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(to_lines([({}, 1, 5.0)]))
    before = path.stat().st_ino
    cut_back(path, 2)
    assert path.stat().st_ino == before
    assert os.listdir(tmp_path) == ["m.jsonl"]


@pytest.mark.parametrize(
    ("end", "kept"), [('{"step": 1, "ti', []), ('{"step": 7, "time": 1.0}', [7])]
)
def test_a_last_line_without_its_end_is_removed_or_ended(make, batches, tmp_path, end, kept):
    path = tmp_path / "m.jsonl"
    path.write_text(end)
    make(JsonlLogger(path=path)).validate(batches[:1])
    assert steps(path) == [*kept, 0]


# ---- failures


def test_a_file_that_cannot_be_written_is_told_once_and_training_goes_on(
    make, batches, tmp_path, caplog
):
    (tmp_path / "folder").mkdir()
    trainer = make(JsonlLogger(path=tmp_path / "folder"))
    trainer.fit(batches)
    assert trainer.global_step == 4
    assert caplog.text.count("metrics are lost") == 1


def test_a_full_disk_is_told_once_and_training_goes_on(make, batches, caplog):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    trainer = make(JsonlLogger(path="/dev/full"))
    trainer.fit(batches)
    trainer.close()
    assert trainer.global_step == 4
    assert caplog.text.count("metrics are lost") == 1


def test_lines_are_in_the_file_after_an_exception(make, batches):
    class Fail(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 2:
                raise RuntimeError("stop")

    trainer = make(JsonlLogger(), callbacks=[Fail()])
    with pytest.raises(RuntimeError):
        trainer.fit(batches)
    assert steps(trainer.model_dir / "metrics.jsonl") == [1, 2]
