"""What a step of Slurm says: variables as Slurm 22.05 to 25.05 sets them."""

from __future__ import annotations

import pytest

from backends.coordination.launch import Launch, local_rank, num_restarts, read_launch
from backends.errors import BackendError
from tests.distributed.ranks import environment

JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[3-6]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
MASTER = {"MASTER_ADDR": "node3", "MASTER_PORT": "20077"}
SCRIPT = {**JOB, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SCRIPT["SLURM_GTIDS"] = "0"
STEP = {
    **JOB,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[3-6]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_GTIDS": "4,5",
}


def test_a_task_of_a_step_is_a_rank() -> None:
    assert read_launch({**STEP, **MASTER}) == Launch(
        rank=5,
        local_rank=1,
        world_size=7,
        local_world_size=2,
        run_id="77.2",
        host="node3",
        port=20077,
    )
    assert local_rank({**STEP, **MASTER}) == 1


def test_a_node_may_have_fewer_tasks() -> None:
    last = {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_GTIDS": "6"}
    found = read_launch({**STEP, **MASTER, **last})
    assert found is not None
    assert (found.rank, found.local_rank, found.local_world_size) == (6, 0, 1)


def test_the_tasks_of_one_node_need_no_other_address() -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    step |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"}
    found = read_launch({**step, **MASTER, "SLURM_GTIDS": "0,1,2,3"})
    assert found is not None
    assert found.is_one_host


@pytest.mark.parametrize(
    ("what", "env"),
    [
        ("each task is a program of its own", STEP),
        ("no port", {**STEP, "MASTER_ADDR": "node3"}),
        ("the script of a job of several tasks", {**SCRIPT, **MASTER}),
        ("a shell of salloc", {**JOB, **MASTER}),
        (
            "a shell of salloc in a step of its own",
            {**STEP, **MASTER, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        ),
        ("one task of a larger job", {**STEP, **MASTER, "SLURM_STEP_NUM_TASKS": "1"}),
        ("a script that was submitted by a task", {**STEP, **MASTER, **SCRIPT}),
        ("a process that was told to be alone", {**STEP, **MASTER, "WORLD_SIZE": "1"}),
        ("the only process of torchrun", {**STEP, **MASTER, **environment(0, 1, 29500)}),
    ],
)
def test_other_processes_are_alone(what: str, env: dict[str, str]) -> None:
    assert read_launch(env) is None, what
    assert local_rank(env) in (None, 0)


def test_torchrun_in_a_task_comes_first() -> None:
    found = read_launch({**STEP, **MASTER, **environment(1, 4, 29500)})
    assert found is not None
    assert (found.rank, found.world_size, found.port) == (1, 4, 29500)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: .* from 1 to 65535, got 70000"),
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID: .* from 0 to 6, got 7"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID: .* from 0 to 1, got ''"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID: .* from 0 to 1, got 2"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS: .* got 'many'"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "TASKS_PER_NODE is '' and SLURM_NODEID '2'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"TASKS_PER_NODE is '2\(x' and"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID '4', so it is unknown"),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID '', so it is unknown"),
        ({"SLURM_PTY_PORT": "1"}, "--pty gives 7 tasks one terminal. .* unset MASTER_ADDR"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        read_launch({**STEP, **MASTER, **changes})


def test_restarts_of_the_job_and_of_torchrun_count() -> None:
    assert num_restarts({}) == 0
    assert num_restarts({"SLURM_RESTART_COUNT": "2"}) == 2
    counts = {"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert num_restarts(counts) == 3
    found = read_launch({**STEP, **MASTER, "SLURM_RESTART_COUNT": "4"})
    assert found is not None
    assert found.restart_count == 4
