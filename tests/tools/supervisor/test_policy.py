"""Which ends are followed by another attempt, and when."""

from __future__ import annotations

import pytest

from modelzoo_trainer.tools.supervisor.outcome import Ending, Outcome, Policy

KILLED = Ending(outcome=Outcome.KILLED, cause="", exit_code=1)


def crash(message, step):
    return Ending(
        outcome=Outcome.CRASHED, cause="", exit_code=1, fingerprint=("Error", message, step)
    )


def decide(policy, ending, start, end, budget=3):
    return policy.decide(ending, (0, start), (0, end), budget)


def test_without_progress_pauses_grow_until_the_budget_is_used_up():
    policy = Policy()
    made = [decide(policy, KILLED, 0, 0) for _ in range(4)]
    assert [one.is_again for one in made] == [True, True, True, False]
    assert [one.pause_s for one in made[:3]] == [1, 2, 4]
    assert made[3].reason == "3 restarts in a row without progress"


def test_pauses_do_not_grow_forever():
    policy = Policy()
    assert max(decide(policy, KILLED, 0, 0, 1000).pause_s for _ in range(100)) == 60


def test_after_progress_there_is_no_pause_and_the_whole_budget():
    policy = Policy()
    for end in (0, 0, 0):
        decide(policy, KILLED, 0, end)
    made = decide(policy, KILLED, 0, 5)
    assert (made.is_again, made.pause_s) == (True, 0)
    assert made.reason == "giving up after 3 more restarts in a row without progress"
    assert [decide(policy, KILLED, 5, 5).is_again for _ in range(3)] == [True, True, False]


def test_steps_that_were_taken_before_are_no_progress():
    policy = Policy()
    decide(policy, KILLED, 0, 10)
    made = [decide(policy, KILLED, 0, end, budget=2) for end in (8, 10)]
    assert [one.is_again for one in made] == [True, False]


def test_loading_what_was_there_before_is_no_progress():
    policy = Policy()
    decide(policy, KILLED, 0, 0, budget=1)  # failed before it knew where it was
    assert not decide(policy, KILLED, 1000, 1000, budget=1).is_again


def test_another_trainer_is_progress():
    policy = Policy()
    policy.decide(KILLED, (0, 0), (0, 100), 1)
    assert policy.decide(KILLED, (0, 100), (1, 0), 1).pause_s == 0


def test_the_same_error_at_the_same_step_ends_it_if_there_was_no_progress():
    policy = Policy()
    assert decide(policy, crash("a", 3), 0, 3).is_again
    made = decide(policy, crash("a", 3), 2, 3)
    assert not made.is_again
    assert "the same error" in made.reason


@pytest.mark.parametrize("other", [crash("b", 3), crash("a", 2), KILLED])
def test_another_error_does_not(other):
    policy = Policy()
    decide(policy, crash("a", 3), 0, 3)
    assert decide(policy, other, 0, 3).is_again


def test_the_same_error_does_not_if_the_run_got_further():
    policy = Policy()
    decide(policy, crash("a", None), 0, 0)
    assert decide(policy, crash("a", None), 0, 1).is_again


@pytest.mark.parametrize(
    "outcome",
    [Outcome.DONE, Outcome.STOPPED, Outcome.INVALID_CONFIG, Outcome.NOT_RETRYABLE],
)
def test_what_is_no_failure_of_the_machine_is_final(outcome):
    assert not decide(Policy(), Ending(outcome=outcome, cause="", exit_code=0), 0, 5).is_again
