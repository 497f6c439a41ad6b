"""Settings that are tried, and which one a search chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.config.loader import read_value
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.planning import search as searching
from modelzoo_trainer.tools.planning.figures import Figures
from modelzoo_trainer.tools.planning.memory_tracker import MemoryKind, Peak
from modelzoo_trainer.tools.planning.meshes import (
    Choice,
    Mesh,
    choices,
    device_numbers,
    multiples_of_divisors,
)
from modelzoo_trainer.tools.planning.sample_batches import Samples

GIB = 1 << 30


def test_the_numbers_of_devices_are_powers_of_two_and_divisors() -> None:
    assert device_numbers(24) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


def test_the_numbers_for_an_odd_batch_are_multiples_of_its_divisors() -> None:
    assert multiples_of_divisors(15, 12) == [1, 2, 3, 4, 5, 6, 8, 10, 12]


def test_processes_with_other_data_divide_the_batch() -> None:
    found = list(choices(8, 12, is_global=True, sharding=()))
    assert {one.mesh.shard for one in found} == {1, 2, 4}
    assert all(one.mesh.num_devices == 8 for one in found)
    assert {one.num_samples for one in found if one.mesh.shard == 4} == {3}
    assert {one.mesh.shard for one in choices(8, 12, is_global=False, sharding=())} == {1, 2, 4, 8}


def test_recomputation_costs_more_than_smaller_micro_batches() -> None:
    plain = Choice(Mesh(8), None, 64, 1)
    assert plain.cost < Choice(Mesh(8), "full", 64, 64).cost
    assert Choice(Mesh(8), None, 64, 64).cost == 0
    assert Choice(Mesh(4, context=2), None, 64, 64).cost < Choice(Mesh(4, 1, 2), None, 64, 64).cost


def test_the_settings_are_those_that_are_set() -> None:
    sharding = ("meta_init", True), ("param_dtype", "bfloat16")
    choice = Choice(Mesh(4, 2), "full", 8, 2, sharding)
    backend = choice.settings()["backend"]
    assert backend["parallel"] == {"shard": 4, "context": 2}
    changes = choice.changes()
    sharded = "init.backend.sharding={meta_init: true, param_dtype: bfloat16"
    assert f"{sharded}, accumulate_shards: true}}" in changes  # of several micro-batches
    assert f"{sharded}}}" in Choice(Mesh(4, 2), "full", 8, 8, sharding).changes()
    assert 'init.callbacks[ScopedTrainFlags]."csx.performance.micro_batch_size"=2' in changes
    assert "init.backend.parallel=null" in Choice(Mesh(), None, 8, 8).changes()
    for change in changes:
        read_value(change.partition("=")[2], "here")


# ---- the search, with a model of a given size


STATIC, PER_SAMPLE = 100 * GIB, 30 * GIB


def figures_of(choice: Choice, split: float = 1.0) -> Figures:
    """Of a run whose parameters take 100 GiB, and whose activations take 30 GiB a sample.

    A third of them are split by `tensor` only if positions are.

    `split`: the part of the parameters that `tensor` splits.
    """
    kept = {None: 1.0, "selective": 0.5, "full": 0.1}[choice.recomputation]
    mesh = choice.mesh
    part = 1 / mesh.tensor
    part = part if choice.splits_positions else 1 / 3 + 2 / 3 * part
    activations = PER_SAMPLE * choice.micro_batch * kept * part / mesh.context
    parts = Counter(
        {
            MemoryKind.PARAMETERS: round(STATIC * mesh.share(split)),
            MemoryKind.ACTIVATIONS: round(activations),
        }
    )
    peak = Peak(sum(parts.values()), parts, Counter(parts))
    return Figures(
        world_size=mesh.num_devices,
        axes={},
        device="cpu",
        num_data_shards=mesh.shard,
        batch_size=choice.micro_batch,
        num_batches=1,
        num_samples=choice.num_samples,
        num_params=STATIC,
        num_params_here=round(STATIC * mesh.share(split)),
        building=Peak(),
        training=peak,
        exchanges={},
        flops=1,
        num_host_reads=0,
        checkpoint_bytes=1,
        checkpoint_bytes_here=1,
    )


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Any:
    tried: list[Mesh] = []

    def with_samples(
        num: int, devices: int, memory: int, refused: Any = (), *, splits: Any = None
    ) -> Any:
        by_changes = {}
        tried.clear()

        def load(changes: list[str]) -> list[Any]:
            return [type("Plan", (), {"init": {}, "changes": tuple(changes)})()]

        def measure(plan: Any, **_: Any) -> Figures:
            choice = by_changes[plan.changes]
            tried.append(choice.mesh)
            if choice.mesh.tensor in refused:
                raise ConfigError("heads cannot be divided")
            if choice.splits_positions and choice.mesh.tensor > splits:
                raise ConfigError("positions cannot be divided")
            return figures_of(choice)

        def all_choices(*args: Any, **kwargs: Any) -> list[Choice]:
            found = list(choices(*args, **kwargs))
            by_changes.update({tuple(one.changes()): one for one in found})
            return found

        monkeypatch.setattr(searching, "measure", measure)
        monkeypatch.setattr(searching, "choices", all_choices)
        facts = Samples(num, True, lambda _: None), splits is not None
        monkeypatch.setattr(searching, "facts_of", lambda *_, **__: facts)
        return searching.search(load, 0, devices, memory)

    with_samples.tried = tried  # type: ignore[attr-defined]
    return with_samples


def test_the_fewest_devices_that_fit_are_found(find: Any) -> None:
    found = find(64, 64, 80 * GIB)
    assert found.fits
    assert found.choice.mesh == Mesh(2)  # 50 GiB of parameters, 30 GiB of one sample
    assert (found.choice.recomputation, found.choice.micro_batch) == (None, 1)
    assert found.num_measured <= 8


def test_one_device_does_if_the_model_is_small(find: Any) -> None:
    assert find(64, 64, 160 * GIB).choice.mesh == Mesh()


def test_what_refuses_an_axis_is_asked_once(find: Any) -> None:
    find(15, 64, 60 * GIB, refused=(2, 4, 8))
    assert sum(mesh.tensor > 1 for mesh in find.tried) == 1


def test_an_odd_batch_is_divided_by_an_odd_number_of_processes(find: Any) -> None:
    found = find(15, 64, 60 * GIB, refused=(2, 4, 8))
    assert found.fits
    assert found.choice.mesh == Mesh(3)  # no power of two divides the batch


def test_activations_of_one_sample_are_split(find: Any) -> None:
    found = find(4, 16, 20 * GIB, refused=(2, 4, 8))
    assert found.choice.mesh.tensor == 1
    assert found.figures.peak_bytes <= 20 * GIB
    fewer = [one for number in (1, 2, 4) for one in choices(number, 4, is_global=True, sharding=())]
    allowed = [one for one in fewer if one.mesh.tensor == 1]
    assert min(figures_of(one).peak_bytes for one in allowed) > 20 * GIB
    assert found.choice.mesh.num_devices == 8


@pytest.mark.parametrize(("split", "num"), [(0.0, 1), (1.0, 2)])
def test_that_experts_are_not_split_is_measured_once(split: float, num: int) -> None:
    state = searching._Search(partial(figures_of, split=split), 40 * GIB)
    state.measure(Choice(Mesh(2, 1, 4), "full", 1, 1))
    assert state.split == split
    assert state.may_fit(Choice(Mesh(2, 1, 8), "full", 1, 1)) == (split == 1)
    assert len(state.known) == num


@pytest.mark.parametrize("mesh", [Mesh(4, 2, 2), Mesh(1, 1, 8), Mesh(1, 4, 2)])
@pytest.mark.parametrize("split", [0.0, 0.25, 1.0])
def test_what_tensor_splits_follows_from_what_a_process_has(mesh: Mesh, split: float) -> None:
    assert mesh.split(mesh.share(split)) == pytest.approx(split)
    whole = 1 / (mesh.shard * mesh.context) if mesh.shard > 1 else 1
    assert mesh.share(0.0) == whole
    assert mesh.share(1.0) == whole / mesh.tensor


def test_a_kind_is_measured_when_a_micro_batch_may_fit() -> None:
    measured: list[Choice] = []

    def attempt(choice: Choice) -> Figures:
        measured.append(choice)
        return figures_of(choice)

    state = searching._Search(attempt, 80 * GIB)
    state.measure(Choice(Mesh(8), None, 64, 1))
    other = Choice(Mesh(4, 2), None, 128, 1)
    assert not state.may_fit(replace(other, micro_batch=128))
    assert measured == [Choice(Mesh(8), None, 64, 1)]
    assert state.may_fit(replace(other, micro_batch=4))
    assert measured[1:] == [other]


META = (("meta_init", True),)


def test_positions_are_split_where_the_model_can(find: Any) -> None:
    choice = find(1, 32, 20 * GIB, splits=8).choice
    assert choice == Choice(Mesh(tensor=8), None, 1, 1, META, splits_positions=True)
    assert "init.backend.sequence_parallel=true" in choice.changes()
    choice = find(1, 32, 20 * GIB).choice  # the model has no plan
    assert choice == Choice(Mesh(tensor=8), "selective", 1, 1, META)
    assert "init.backend.sequence_parallel=false" in choice.changes()


@pytest.mark.parametrize("splits", [1, 4])  # the largest number of processes
def test_where_positions_cannot_be_split_layers_are(find: Any, splits: int) -> None:
    found = find(1, 32, 20 * GIB, splits=splits)
    assert found.choice == Choice(Mesh(tensor=8), "selective", 1, 1, META)


def test_what_comes_nearest_is_reported(find: Any) -> None:
    found = find(4, 4, 10 * GIB)
    assert not found.fits
    text = searching.report(found, 4, 10 * GIB)
    assert "Nothing fits on 4 devices with 10.0 GiB" in text
    assert "needs" in text


def test_devices_need_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from modelzoo_trainer.tools.planning.command import plan_on_paper

    with pytest.raises(ConfigError, match=r"--devices .*requires --memory"):
        plan_on_paper(lambda _: [], devices="8")
    with pytest.raises(ConfigError, match=r"--world-size .* --devices"):
        plan_on_paper(lambda _: [], "4", "1GiB", devices="8")
    with pytest.raises(ConfigError, match="--devices: expected an integer >= 1, got 'x'"):
        plan_on_paper(lambda _: [], devices="x", memory="1GiB")
