import json

import pytest

from modelzoo_trainer.tools.report.sessions import of_this_run, read_sessions
from modelzoo_trainer.tools.report.timeline import MAX_SPANS, timeline_of
from tests.tools.report.run_lines import losses


def event(kind, time, step=0, /, **facts):
    return {"time": 1000.0 + time, "event": kind, "step": step, **facts}


FIRST = [
    event("start", 0),
    event("train_start", 2, 0),
    event("save", 6, 10, seconds=1.0, name="checkpoint_10"),
    event("validate", 8, 15, seconds=2.0),
    event("train_end", 12, 20),
    event("end", 13, 20, outcome="finished"),
]


def kinds(timeline):
    return [(span.kind, span.start - 1000, span.end - 1000) for span in timeline.spans]


def timeline(run):
    return timeline_of(of_this_run(read_sessions(run)), 1000.0, 1000.0, run)


def test_each_second_goes_to_one_thing(write_run):
    found = timeline(write_run(lines=losses(1), events=FIRST))
    assert kinds(found) == [
        ("startup", 0, 2),
        ("train", 2, 6),
        ("save", 6, 7),
        ("train", 7, 8),
        ("validate", 8, 10),
        ("train", 10, 12),
        ("other", 12, 13),
    ]
    assert found.seconds == {"startup": 2, "train": 7, "save": 1, "validate": 2, "other": 1}
    assert found.goodput == pytest.approx(7 / 13)


def test_a_continuation_is_a_pause_and_no_restart(write_run):
    run = write_run(lines=losses(1), events=FIRST)
    second = run / "logs" / "20260101_000001"
    second.mkdir()
    later = [event("start", 50, 20), event("train_start", 51, 20)]
    (second / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in later))
    found = timeline(run)
    assert [(one.start - 1000, one.end - 1000, one.step) for one in found.pauses] == [(13, 50, 20)]
    assert found.num_restarts == 0


def test_steps_after_the_checkpoint_of_a_restart_are_lost(write_run):
    run = write_run(
        lines=losses(1),
        events=[
            event("start", 0),
            event("train_start", 1, 0),
            event("save", 5, 10, seconds=1.0),
            event("memory", 9, 16),
        ],
    )
    second = run / "logs" / "20260101_000001"
    second.mkdir()
    lines = [
        event("start", 20),
        event("train_start", 21, 10),
        event("train_end", 25, 20),
        event("end", 25, 20, outcome="finished"),
    ]
    (second / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    found = timeline(run)
    assert kinds(found) == [
        ("startup", 0, 1),
        ("train", 1, 5),
        ("save", 5, 6),
        ("lost", 6, 9),
        ("down", 9, 20),
        ("startup", 20, 21),
        ("train", 21, 25),
    ]
    assert (found.num_restarts, found.goodput) == (1, pytest.approx(8 / 25))


def test_an_earlier_run_in_the_folder_is_not_part_of_this_one(write_run):
    run = write_run(lines=losses(1), events=FIRST)
    second = run / "logs" / "20260102_000000"
    second.mkdir()
    lines = [event("start", 5000), event("train_start", 5001, 0), event("end", 5003, 9)]
    (second / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    assert [kind for kind, _, _ in kinds(timeline(run))] == ["startup", "train"]


def add_session(run, name, lines):
    (run / "logs" / name).mkdir()
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    (run / "logs" / name / "events.jsonl").write_text(text)


def test_a_run_that_goes_on_after_its_end_was_not_down_meanwhile(write_run):
    run = write_run(lines=losses(1), events=FIRST)
    more = [event("start", 9000), event("train_start", 9001, 20), event("end", 9003, 30)]
    add_session(run, "20260102_000000", more)
    found = timeline(run)
    assert (found.num_restarts, found.wall_s) == (0, 16)


def test_two_fits_of_a_trainer_are_one_run_without_the_time_between_them(write_run):
    more = [event("start", 500, 20, kind="fit"), event("train_start", 501, 20)]
    more += [event("end", 505, 30, outcome="finished"), event("start", 9000, kind="validate")]
    found = timeline(write_run(lines=losses(1), events=[*FIRST, *more]))
    assert found.seconds["train"] == 7 + 4
    assert (found.num_restarts, found.wall_s) == (0, 13 + 5)


def test_a_validation_on_another_day_is_not_part_of_training(write_run):
    run = write_run(lines=losses(1), events=FIRST)
    later = [
        event("start", 90_000, 20, kind="validate"),
        event("validate", 90_000, 20, seconds=5.0),
        event("end", 90_005, 20, outcome="finished"),
    ]
    add_session(run, "20260102_000000", later)
    assert timeline(run).wall_s == 13


def test_a_background_save_takes_no_time_of_training(write_run):
    events = [event("start", 0), event("train_start", 1), event("save", 2, 5), event("end", 4, 9)]
    assert kinds(timeline(write_run(lines=losses(1), events=events))) == [
        ("startup", 0, 1),
        ("train", 1, 4),
    ]


def test_without_events_the_times_of_the_metrics_are_the_run(write_run):
    found = timeline_of([], 5.0, 9.0, write_run(lines=losses(1)))
    assert [(span.kind, span.seconds) for span in found.spans] == [("train", 4)]
    assert found.source == "metrics"


def test_the_seconds_of_a_supervised_run_are_the_supervisors(write_run):
    ledger = {"seconds": {"steps": 60, "data": 20, "compiling": 15, "lost": 5}, "num_restarts": 3}
    run = write_run(
        lines=losses(1),
        events=FIRST,
        files={"restarts/20260101_000000/ledger.json": json.dumps(ledger)},
    )
    found = timeline(run)
    assert found.seconds == {"train": 60, "data": 20, "startup": 15, "lost": 5}
    assert (found.num_restarts, found.goodput, found.source) == (3, 0.6, "supervisor")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seconds": 3}', '{"seconds": {"steps": "x"}}'])
def test_a_broken_ledger_is_ignored(text, write_run):
    run = write_run(lines=losses(1), events=FIRST, files={"restarts/1/ledger.json": text})
    assert timeline(run).source == "events"


def test_of_very_many_spans_the_longest_are_drawn_and_all_are_counted(write_run):
    saves = [event("save", 10 + 2 * idx, idx, seconds=1.0 + (idx == 7)) for idx in range(MAX_SPANS)]
    run = write_run(
        lines=losses(1),
        events=[event("start", 0), event("train_start", 1), *saves, event("end", 5000, 1)],
    )
    found = timeline(run)
    assert (len(found.spans), found.num_left_out > 0) == (MAX_SPANS, True)
    assert found.seconds["save"] == pytest.approx(MAX_SPANS + 1)
