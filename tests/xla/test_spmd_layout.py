from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.errors import BackendError
from backends.xla.spmd import MeshShape

pytestmark = pytest.mark.xla

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("spmd_layout_worker.py")
Facts = dict[str, Any]


def start(mode: str, num_devices: int) -> Facts:
    """Run the worker, as a process cannot leave SPMD, nor change the number of its devices."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_USE_SPMD"} | {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(num_devices),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def one() -> Facts:
    """What one device does without SPMD."""
    return start("plain", 1)


@pytest.fixture(scope="module")
def four() -> Facts:
    """What four devices do."""
    return start("spmd", 4)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"replicate": 4}, (4, 1)),
        ({"shard": 4}, (1, 4)),
        ({"replicate": 2, "shard": 2}, (2, 2)),
        ({"replicate": -1}, (4, 1)),
        ({"replicate": 2, "shard": -1}, (2, 2)),
        ({"replicate": -1, "shard": 4}, (1, 4)),
        ({"shard": -1, "tensor": 1}, (1, 4)),
    ],
)
def test_sizes_that_fit_the_devices_are_taken(
    options: dict[str, int], sizes: tuple[int, int]
) -> None:
    layout = MeshShape.from_options(options, 4)
    assert (layout.replicate, layout.shard) == sizes


def test_nothing_given_fits_one_device() -> None:
    assert MeshShape.from_options({}, 1) == MeshShape(replicate=1, shard=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shard": 3},
            r"parallel: \{shard: 3\} does not match 4 XLA devices.*4 x 1, 2 x 2, 1 x 4; -1 is the",
        ),
        ({"replicate": 3, "shard": -1}, r"\{replicate: 3, shard: -1\} does not match 4"),
        ({"replicate": 8, "shard": -1}, r"\{replicate: 8, shard: -1\} does not match 4"),
        ({}, r"\{\} does not match 4 XLA devices, all of which are used"),
        ({"replicate": -1, "shard": -1}, r"replicate and shard are both -1"),
        ({"replicate": 0}, r"parallel\.replicate: .*, or -1 .* got 0"),
        ({"shard": -2}, r"parallel\.shard: .* got -2"),
        ({"shard": 2.0}, r"parallel\.shard: .* got 2\.0"),
        ({"shard": True}, r"parallel\.shard: .* got True"),
        ({"shards": 4}, r"parallel\.shards: no such axis. Did you mean 'shard'\?"),
        ({"width": 4}, r"parallel\.width: no such axis. Known: replicate, shard\."),
        ({"tensor": 2, "shard": 2}, r"parallel\.tensor is 2, but tensor parallelism is not sup"),
        (4, r"backend\.parallel: .* \{replicate: -1\}, got 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_message(options: Any, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        MeshShape.from_options(options, 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["4x1", "1x4", "2x2"])
def test_losses_are_those_of_one_device(layout: str, one: Facts, four: Facts) -> None:
    assert len(one["losses"]) == 10
    assert four[layout]["losses"] == pytest.approx(one["losses"], abs=1e-5)


@pytest.mark.slow
def test_batches_that_cannot_be_divided_give_the_losses_of_one_device(
    one: Facts, four: Facts
) -> None:
    assert four["uneven_losses"] == pytest.approx(one["uneven_losses"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["4x1", "1x4", "2x2"])
def test_steps_are_compiled_at_the_start_only(layout: str, four: Facts) -> None:
    assert four[layout]["late_compilations"] == 0
    assert four[layout]["executions"] == 14  # in 7 steps: the learning rate's, and the step's


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["4x1", "1x4", "2x2"])
def test_names_and_ties_stay(layout: str, four: Facts) -> None:
    assert four[layout]["names_kept"]
    assert four[layout]["tied"]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "parts"), [("4x1", 1), ("1x4", 4), ("2x2", 2)])
def test_each_device_holds_its_part_after_three_steps(layout: str, parts: int, four: Facts) -> None:
    held = four[layout]["after_3"]
    assert held["embed"] == [[96 // parts, 32]] * 4
    assert held["wide.weight"] == [[64 // parts, 32]] * 4
    assert held["wide.weight.exp_avg"] == [[64 // parts, 32]] * 4
    assert held["wide.weight.exp_avg_sq"] == [[64 // parts, 32]] * 4


@pytest.mark.slow
def test_small_things_scalars_and_buffers_are_on_every_device(four: Facts) -> None:
    held = four["1x4"]["after_3"]
    assert held["wide.bias"] == [[64]] * 4
    assert held["frozen.weight"] == [[7, 32]] * 4
    assert held["scale"] == [[]] * 4
    assert held["counts"] == [[64]] * 4
    assert held["wide.weight.step"] == [[]] * 4


@pytest.mark.slow
def test_a_loaded_run_is_placed_as_before_and_goes_on_bit_by_bit(four: Facts) -> None:
    assert four["reload"]["loaded"] == four["1x4"]["after_3"]
    assert four["reload"]["differences"] == [0.0, 0.0, 0.0]
    assert four["reload"]["compilations_after_load"] <= 1


@pytest.mark.slow
def test_fetching_spread_tensors_compiles_nothing(four: Facts) -> None:
    assert four["reload"]["fetched_equals_own"]
    assert four["reload"]["compilations_of_fetch"] == 0


@pytest.mark.slow
def test_each_device_is_sent_its_part_only(four: Facts) -> None:
    upper, lower = [[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]
    assert four["placing"]["transfers"] == 2  # two tensors, neither of them twice
    assert four["placing"]["parts"] == [upper, lower, upper, lower]


@pytest.mark.slow
def test_what_is_sent_with_its_place_is_there_at_once(four: Facts) -> None:
    assert four["placing"]["sent_parts"] == [[[3, 2]] * 4, [[6, 2]] * 4]
    assert four["placing"]["transfers_of_sent"] == 2


@pytest.mark.slow
def test_fetched_tensors_are_whole(four: Facts) -> None:
    scalar, spread, pending = four["placing"]["fetched"]
    assert scalar == 3
    assert spread == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert pending == [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18], [20, 22]]


@pytest.mark.slow
def test_a_tensor_can_be_given_another_place(four: Facts) -> None:
    assert four["placing"]["moved"] == [True] * 4


@pytest.mark.slow
def test_the_largest_dimension_is_divided(four: Facts) -> None:
    assert four["placing"]["column_parts"] == [[2, 4]] * 4


@pytest.mark.slow
def test_only_what_can_be_divided_evenly_is(four: Facts) -> None:
    # (8, 2), (6, 2), (2,), () and (4,)
    assert four["placing"]["divided"] == [True, False, False, False, True]


@pytest.mark.slow
def test_a_process_that_has_used_one_device_is_not_switched(one: Facts) -> None:
    assert "this process has already used XLA without it" in one["late_start"]


@pytest.mark.slow
def test_a_second_start_changes_nothing_and_nobody_warns_of_the_partitioner(four: Facts) -> None:
    assert four["devices"] == [4, 4]
    assert "GSPMD" not in four["stderr"]
