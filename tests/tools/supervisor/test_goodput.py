"""The goodput of a run, from what its attempts measured."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelzoo_trainer.tools.supervisor.goodput import KINDS, Attempt, Goodput
from modelzoo_trainer.tools.supervisor.outcome import Ending, Outcome
from modelzoo_trainer.tools.supervisor.protocol import UNKNOWN, SharedStatus, TimeKind

DONE = Ending(outcome=Outcome.DONE, cause="finished", exit_code=0)
STOPPED = Ending(outcome=Outcome.STOPPED, cause="stopped by SIGTERM", exit_code=143)
KILLED = Ending(outcome=Outcome.KILLED, cause="killed by SIGKILL", exit_code=1)


def attempt(ending=KILLED, steps=8.0, first=0.0, unfinished=0.0, down=0.0, **facts):
    seconds = {TimeKind.STEPS: steps, TimeKind.FIRST_STEP: first, TimeKind.CUT_OFF: unfinished}
    return Attempt(number=1, down_s=down, shared=measured(seconds, **facts), ending=ending)


def measured(seconds, **facts):
    shared = SharedStatus()
    shared.begin_trainer(0)
    for kind, value in seconds.items():
        shared.seconds[kind] = value
    for name, value in facts.items():
        setattr(shared, name, UNKNOWN if value is None else value)
    return shared


def breakdowns_of(*attempts):
    goodput = Goodput(["run"], "now")
    goodput.attempts += attempts
    return goodput.breakdowns()


def test_what_a_run_that_ends_in_order_did_is_useful():
    for ending in (DONE, STOPPED):
        [account] = breakdowns_of(attempt(ending, start_step=0, step=8, saved_step=4))
        assert (account["steps"], account["lost"]) == (8, 0)


def test_steps_after_the_last_checkpoint_are_lost():
    first = attempt(start_step=0, step=10, saved_step=6, spent_at_save=5.0)
    accounts = breakdowns_of(first, attempt(DONE, start_step=6, step=12))
    assert (accounts[0]["steps"], accounts[0]["lost"]) == (5, 3)
    assert accounts[1]["lost"] == 0


def test_of_a_run_without_a_checkpoint_all_is_lost():
    [account] = breakdowns_of(attempt(start_step=0, step=10))
    assert (account["steps"], account["lost"]) == (0, 8)


def test_steps_that_an_older_checkpoint_gave_up_are_lost_in_every_attempt_that_took_them():
    first = attempt(start_step=0, step=8, saved_step=8, spent_at_save=8.0)
    second = attempt(start_step=8, step=16, saved_step=16, spent_at_save=8.0)
    accounts = breakdowns_of(first, second, attempt(DONE, start_step=4, step=20))
    assert [account["lost"] for account in accounts] == [4, 8, 0]
    assert [account["steps"] for account in accounts] == [4, 0, 8]


def test_an_attempt_that_did_not_come_to_train_takes_nothing_from_another():
    first = attempt(start_step=0, step=4, saved_step=4, spent_at_save=8.0)
    accounts = breakdowns_of(first, attempt(steps=0.0), attempt(DONE, start_step=4, step=8))
    assert [account["lost"] for account in accounts] == [0, 0, 0]


def test_steps_of_an_earlier_trainer_are_not_lost_with_those_of_the_next():
    both = attempt(num_done=1, trainer=1, start_step=0, step=4, spent_at_start=6.0)
    [account] = breakdowns_of(both)
    assert (account["steps"], account["lost"]) == (6, 2)


def test_the_steps_of_a_trainer_that_is_done_are_kept_though_it_saved_nothing():
    [account] = breakdowns_of(attempt(num_done=1, trainer=0, start_step=0, step=4))
    assert (account["steps"], account["lost"]) == (8, 0)


def test_what_the_first_batch_took_longer_is_compiling():
    [account] = breakdowns_of(attempt(DONE, first=5.0, median_s=2.0, start_step=0, step=5))
    assert (account["compiling"], account["steps"]) == (3, 10)
    [account] = breakdowns_of(attempt(DONE, first=1.0, median_s=2.0, start_step=0, step=5))
    assert (account["compiling"], account["steps"]) == (0, 9)


def test_of_a_single_batch_all_is_compiling():
    [account] = breakdowns_of(attempt(DONE, steps=0.0, first=5.0, start_step=0, step=1))
    assert (account["compiling"], account["steps"]) == (5, 0)


def test_the_time_in_a_step_that_did_not_end_is_lost():
    [account] = breakdowns_of(attempt(start_step=0, step=0, steps=0.0, unfinished=7.0))
    assert account["lost"] == 7


NUMBERS = st.floats(0, 1000)
STEPS = st.none() | st.integers(0, 50)


@st.composite
def attempts(draw):
    made = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        start, more, saved = draw(STEPS), draw(st.integers(0, 20)), draw(STEPS)
        step = None if start is None else start + more
        seconds = {kind: draw(NUMBERS) for kind in TimeKind}
        made.append(
            Attempt(
                number=number,
                down_s=draw(NUMBERS),
                shared=measured(
                    seconds,
                    trainer=draw(st.integers(0, 1)),
                    num_done=draw(st.integers(0, 1)),
                    start_step=start,
                    step=step,
                    saved_step=saved,
                    spent_at_start=0.5 * seconds[TimeKind.STEPS],
                    spent_at_save=draw(st.floats(0.5, 1)) * seconds[TimeKind.STEPS],
                    median_s=draw(st.none() | NUMBERS),
                ),
                ending=draw(st.sampled_from([DONE, STOPPED, KILLED])),
            )
        )
    return made


@settings(
    deadline=None,
    max_examples=200,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(attempts())
def test_whatever_was_measured_the_account_adds_up_and_nothing_is_negative(made):
    for one, account in zip(made, breakdowns_of(*made), strict=True):
        assert sum(account.values()) == pytest.approx(sum(one.shared.seconds) + one.down_s)
        assert set(account) == set(KINDS)
        assert min(account.values()) >= -1e-9


def test_the_time_of_a_child_adds_up_to_its_life():
    begin = time.monotonic()
    shared = SharedStatus.create()
    created = shared.since
    shared.switch(TimeKind.STEPS)
    shared.switch(TimeKind.SAVING)
    shared.end()
    elapsed = time.monotonic() - begin
    total = shared.since - created
    assert sum(shared.seconds) == pytest.approx(total)
    assert total <= elapsed
    assert shared.seconds[TimeKind.SAVING] > 0
    assert (shared.start_step, shared.step, shared.saved_step, shared.median_s) == (UNKNOWN,) * 4
    shared.close()


def test_the_time_since_the_last_hook_is_of_a_step_that_did_not_end():
    shared = SharedStatus.create()
    shared.switch(TimeKind.STEPS)
    shared.end()
    assert shared.seconds[TimeKind.STEPS] == 0
    assert shared.seconds[TimeKind.CUT_OFF] > 0
    shared.close()


def test_the_summary_is_a_line():
    goodput = Goodput(["run"], "now")
    assert goodput.to_dict()["attempts"] == []
    goodput.attempts.append(attempt(DONE, start_step=0, step=8, down=2.0))
    assert goodput.summary() == "done after 1 attempt and 10.0 s: steps 80 %, down 20 %"
    goodput.attempts.append(attempt(DONE, steps=0.0, down=10.0))
    assert goodput.summary() == "done after 2 attempts and 20.0 s: steps 40 %, down 60 %"
    assert goodput.to_dict()["goodput"] == 0.4
