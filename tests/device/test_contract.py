"""What every backend promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from backends import Backend, BackendError, BackendUnavailable, Comm, Stream, make_backend
from backends.cpu import CpuBackend

Make = Callable[..., Backend]
SETTINGS: Any = torch.utils.deterministic


def mask(backend: Backend, index: int, stream: Stream = Stream.TRAIN) -> list[float]:
    with backend.step(index, stream):
        dropped = nn.functional.dropout(torch.ones(64, device=backend.device), 0.5)
    return backend.host_state(dropped).tolist()


# ---- life


def test_a_backend_that_was_made_is_available(backend: Backend) -> None:
    assert type(backend).is_available()


def test_an_unknown_device_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BackendUnavailable, match=r"'cudda' is not a backend. Did you mean 'cuda'"):
        make_backend("cudda")


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BackendError, match=r"no such option of meta. Did you mean 'deterministic'"):
        make_backend("meta", {"determinstic": True})


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_a_device_that_is_not_there_is_refused_and_what_is_there_is_said() -> None:
    with pytest.raises(BackendUnavailable, match=r"'gpu' is not available: torch .* finds no acc"):
        make_backend("gpu")


def test_close_undoes_the_switches_of_the_process(kind: str, open_backend: Make) -> None:
    before = torch.get_float32_matmul_precision()
    backend = open_backend(kind, matmul_precision="medium", deterministic=True)
    during = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    backend.close()
    assert during == ("medium", True)
    assert torch.get_float32_matmul_precision() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_does_not_fill_new_tensors(kind: str, open_backend: Make) -> None:
    backend = open_backend(kind, deterministic=True)
    assert not SETTINGS.fill_uninitialized_memory
    backend.close()
    assert SETTINGS.fill_uninitialized_memory


def test_open_twice_and_close_leaves_the_process_as_it_was(kind: str, open_backend: Make) -> None:
    before = torch.get_float32_matmul_precision()
    backend = open_backend(kind, matmul_precision="medium")
    backend.open()
    backend.close()
    backend.close()
    assert torch.get_float32_matmul_precision() == before


# ---- the contract itself


def test_the_contract_is_small_and_says_of_each_name_what_it_is() -> None:
    names = {name for name in [*dir(Backend), *vars(CpuBackend())] if not name.startswith("_")}
    methods = {name for name in names if callable(getattr(Backend, name, None))}
    assert {name for name in methods if not getattr(Backend, name).__doc__} == set()
    on_comm = {name for name in names if hasattr(Comm, name)}
    assert on_comm == {
        *("barrier", "broadcast_object", "data_shard", "gather_object", "is_main", "reduce")
    }
    assert len(names) <= 46


# ---- other processes


def test_one_process_is_alone_and_agrees_with_itself(backend: Backend) -> None:
    comm = backend.comm
    assert (comm.rank, comm.local_rank, comm.world_size, comm.data_shard) == (0, 0, 1, (0, 1))
    assert comm.is_main
    assert comm.process_group is None
    assert comm.any_true(True)
    assert not comm.any_true(False)
    assert comm.try_barrier("here")
    assert comm.gather_from_shards(3) == [3]
    assert not comm.is_sharded(torch.ones(2))
    comm.propose("save")
    comm.propose("stop")
    assert [*comm.decided()] == ["save", "stop"]
    assert [*comm.decided()] == []


def test_what_callbacks_ask_most_is_on_the_backend_too(backend: Backend) -> None:
    backend.comm.rank, backend.comm.data_shard = 1, (1, 2)
    tensor = torch.ones(2)
    assert not backend.is_main
    assert backend.data_shard == (1, 2)
    assert backend.reduce(tensor, "mean") is tensor
    assert backend.broadcast_object("a") == "a"
    assert backend.gather_object("a") == ["a"]
    backend.barrier("here")


# ---- random numbers


def test_a_step_draws_the_same_whatever_was_drawn_before(valued: Backend) -> None:
    first = mask(valued, 3)
    torch.rand(7, device=valued.device)
    mask(valued, 4)
    assert mask(valued, 3) == first


def test_steps_draw_differently(valued: Backend) -> None:
    assert mask(valued, 3) != mask(valued, 4)


def test_runs_with_other_seeds_draw_differently(valued: Backend) -> None:
    first = mask(valued, 3)
    valued.seed = 18
    assert mask(valued, 3) != first


def test_validation_draws_its_own_and_leaves_training_alone(valued: Backend) -> None:
    first = mask(valued, 3)
    validation = mask(valued, 3, Stream.VALIDATE)
    assert validation != first
    assert mask(valued, 3) == first


def test_the_host_generator_is_seeded_by_the_step_on_every_device(
    kind: str, open_backend: Make
) -> None:
    backend, host = open_backend(kind), open_backend("cpu")
    with backend.step(5):
        drawn = torch.rand(4)
    with host.step(5):
        expected = torch.rand(4)
    assert drawn.tolist() == expected.tolist()


def test_weights_are_initialised_alike_on_every_device(
    valued_kind: str, open_backend: Make
) -> None:
    backend, host = open_backend(valued_kind), open_backend("cpu")
    torch.manual_seed(0)
    with host.building():
        expected = nn.Linear(4, 4)
    torch.manual_seed(0)
    with backend.building():
        model = nn.Linear(4, 4)
    backend.prepare_model(model)
    assert torch.equal(backend.host_state(model.weight), expected.weight)


def test_random_states_are_restored(valued: Backend) -> None:
    def draw() -> tuple[Any, ...]:
        on_device = valued.host_state(torch.rand(3, device=valued.device)).tolist()
        return on_device, torch.rand(3).tolist(), random.random(), np.random.rand()

    state = valued.rng_state()
    first = draw()
    valued.set_rng_state(state)
    assert draw() == first


# ---- batches


def test_batches_come_in_order_on_the_device(backend: Backend) -> None:
    loader = [{"x": torch.zeros(n), "name": f"{n}"} for n in (1, 2, 3)]
    batches = list(backend.batches(loader))
    assert [batch["name"] for batch in batches] == ["1", "2", "3"]
    assert [len(batch["x"]) for batch in batches] == [1, 2, 3]
    assert {batch["x"].device.type for batch in batches} == {backend.device.type}


def test_no_batch_is_no_error(backend: Backend) -> None:
    assert list(backend.batches([])) == []


def test_an_error_of_the_loader_comes_at_its_place(backend: Backend) -> None:
    def loader() -> Iterator[Tensor]:
        yield torch.zeros(1)
        yield torch.zeros(2)
        raise OSError("disk")

    batches = backend.batches(loader())
    assert [len(next(batches)), len(next(batches))] == [1, 2]
    with pytest.raises(OSError, match=r"disk"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_a_packed_sequence_is_a_batch(valued: Backend) -> None:
    (packed,) = valued.batches([pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])])
    assert packed.data.device.type == valued.device.type
    assert packed.batch_sizes.device.type == "cpu"


# ---- state and facts


def test_host_state_is_a_copy_on_the_host(valued: Backend) -> None:
    state = {"weight": torch.ones(2, device=valued.device), "step": 3}
    copy = valued.host_state(state)
    state["weight"].zero_()
    assert copy["weight"].tolist() == [1.0, 1.0]
    assert copy["weight"].device.type == "cpu"
    assert copy["step"] == 3


def test_memory_figures_are_positive(backend: Backend) -> None:
    keep = torch.ones(1000, device=backend.device)
    figures = backend.memory()
    assert figures["host_peak_bytes"] > 10_000_000
    assert min(figures.values()) > 0
    del keep


def test_counts_are_numbers(backend: Backend) -> None:
    assert all(isinstance(value, int) for value in backend.counters().values())


def test_an_error_for_want_of_memory_says_what_to_lower(backend: Backend) -> None:
    error = torch.OutOfMemoryError("tried to allocate 20 GiB")
    backend.explain(error)
    for fact in (f"Out of memory on {backend.device}", "activation_checkpointing", "shard: -1"):
        assert fact in error.__notes__[0]
    assert "grad_accum_steps" in error.__notes__[0]


def test_one_process_agrees_with_itself(backend: Backend) -> None:
    backend.comm.barrier("here")
    value = torch.ones(2, device=backend.device)
    assert backend.comm.is_main
    assert backend.comm.data_shard == (0, 1)
    assert backend.comm.any_true(True)
    assert not backend.comm.any_true(False)
    assert backend.comm.reduce(value, "mean") is value
    assert backend.comm.broadcast_object("x") == "x"
    backend.synchronize()
