import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.sparsity import SET, UpdateAt, UpdateEvery
from modelzoo_trainer.optim.sparsity.updates import as_updates


def due(updates, num=13):
    return [step for step in range(num) if updates.is_due(step)]


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"freq": 5}, [5, 10]),
        ({"freq": 5, "start": 0}, [0, 5, 10]),
        ({"freq": 5, "start": 2, "stop": 12}, [2, 7]),
        ({"freq": 5, "start": 2, "stop": 13}, [2, 7, 12]),
        ({"steps": [7, 0, 7, 3]}, [0, 3, 7]),
    ],
)
def test_updates_are_due_at_their_steps(given, steps):
    assert due(as_updates(given, "x")) == steps


def test_the_last_update_is_known_at_any_step():
    updates = UpdateEvery(5, start=2, stop=12)
    assert [updates.last(step) for step in (-1, 1, 2, 6, 7, 100)] == [
        (0, 0),
        (0, 0),
        (2, 1),
        (2, 1),
        (7, 2),
        (7, 2),
    ]
    assert [UpdateAt([0, 4]).last(step) for step in (-1, 0, 3, 9)] == [
        (0, 0),
        (0, 1),
        (0, 1),
        (4, 2),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "SET.update: expected a mapping with freq or steps, got 3"),
        ({"freq": 0}, "update.freq: expected an integer > 0, got 0"),
        ({"freq": 1, "stop": -1}, "update.stop: expected an integer >= 0 or null, got -1"),
        ({"freq": 1, "every": 1}, "SET.update.every: no such argument of UpdateEvery"),
        ({"start": 1}, "SET.update.freq is missing"),
        ({"steps": []}, r"update.steps: expected a list .*, got \[\]"),
        ({"steps": [1, True]}, r"update.steps\[1\]: expected an integer >= 0, got true"),
        ({"freq": 3, "start": 4, "stop": 4}, "update.stop is 4, but the first update is at step 4"),
        ({"freq": 100, "stop": 50}, "update.stop is 50, but the first update is at step 100"),
        ({"steps": [1], "freq": 1}, "SET.update.freq: no such argument of UpdateAt"),
    ],
)
def test_other_updates_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SET(0.5, update=given)
