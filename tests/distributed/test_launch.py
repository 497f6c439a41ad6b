"""What a launcher says."""

from __future__ import annotations

import pytest

from backends.coordination.launch import Launch, read_launch
from backends.errors import BackendError
from tests.distributed.ranks import environment


def test_a_process_without_a_launcher_is_alone() -> None:
    assert read_launch({"PATH": "/bin", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}) is None


def test_a_process_of_one_is_alone() -> None:
    assert read_launch(environment(0, 1, 29500)) is None


def test_what_torchrun_sets_is_read() -> None:
    env = {**environment(2, 4, 29500), "TORCHELASTIC_RESTART_COUNT": "1"}
    env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}

    assert read_launch(env) == Launch(
        rank=2,
        local_rank=0,
        world_size=4,
        local_world_size=2,
        run_id="test",
        restart_count=1,
        max_restarts=3,
        host="127.0.0.1",
        port=29500,
        uses_agent_store=True,
    )


def test_another_launcher_sets_the_least() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    found = read_launch({**env, "MASTER_ADDR": "node7", "MASTER_PORT": "1234"})

    assert found is not None
    assert (found.run_id, found.restart_count, found.local_world_size) == ("node7:1234", 0, 2)
    assert not found.uses_agent_store


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": ""}, "RANK and WORLD_SIZE are set in the .*, but not MASTER_PORT"),
        ({"RANK": ""}, "WORLD_SIZE is set in the environment, but not RANK"),
        ({"RANK": "two"}, "RANK: expected an integer .* got 'two'"),
        ({"RANK": "4"}, "RANK: .* from 0 to 3, got 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: .* >= 1, got 0"),
        ({"WORLD_SIZE": "1"}, "RANK: .* from 0 to 0, got 1"),
        ({"LOCAL_RANK": ""}, "WORLD_SIZE is 4, but LOCAL_RANK is not set.*torchrun"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, LOCAL_WORLD_SIZE 4 and WORLD_SIZE 4"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE 8 and WORLD_SIZE 4"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: .* from 1 to 65535, got 70000"),
        ({"TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT: .* got -1"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(
    changes: dict[str, str], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        read_launch({**environment(1, 4, 29500), **changes})
