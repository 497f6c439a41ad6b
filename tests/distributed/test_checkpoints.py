"""What several processes save together, any number of them goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.checkpointing import load, read_manifest
from tests.distributed.ranks import run_ranks
from tests.distributed.training import train

GLOBAL_BATCH, NUM_STEPS, CUT = 12, 7, 3
OPTIONS = {"counts": "tensor", "optimizer": torch.optim.AdamW, "lr": 0.01, "epochs": 3, "save": 1}
ENGINES = {"DDP": {}, "FSDP2": {"parallel": {"shard": -1}}}


def run(num: int, folder: Path, max_steps: int, engine: str, **options: Any) -> dict[str, Any]:
    """Train to a step with `num` processes, of which each has its part of the same batches."""
    given = {**OPTIONS, "max_steps": max_steps, "eval_frequency": None, **options}
    if num == 1:
        return train(0, folder, GLOBAL_BATCH, given)
    given["backend"] = ENGINES[engine]
    return run_ranks(num, train, folder, GLOBAL_BATCH // num, given)[0]


def weights_of(found: dict[str, Any]) -> torch.Tensor:
    return torch.cat(
        [torch.tensor(value, dtype=torch.float64).flatten() for value in found["weights"].values()]
    )


# CI: from each engine to the other, and each way to save.
@pytest.mark.soak_cases("DDP-FSDP2-True", "FSDP2-DDP-False")
@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("engine", "other"), [("DDP", "FSDP2"), ("FSDP2", "DDP")])
def test_saved_on_2_it_goes_on_on_1_2_3_and_4(tmp_path, engine, other, asynchronous) -> None:
    whole = run(2, tmp_path / "whole", NUM_STEPS, engine)
    checkpoint = {"checkpoint": {"asynchronous": asynchronous}}
    for num in (1, 2, 3, 4):
        folder = tmp_path / str(num)
        run(2, folder, CUT, engine, **checkpoint)
        files = ["shard-{}.safetensors", "values-{}.json"]
        if engine == "FSDP2":
            files.append("whole-{}.safetensors")
        expected = {
            "shards.json",
            *(one.format(rank) for one in files for rank in ("00000", "00001")),
        }
        assert set(read_manifest(folder / f"checkpoint_{CUT}").files) == expected
        rest = run(num, folder, NUM_STEPS, other if num == 3 else engine, **checkpoint)
        assert rest["step"] == NUM_STEPS
        assert len(rest["grads"]) == NUM_STEPS - CUT
        if num == 2:  # the same number of processes: the same bits
            assert torch.equal(weights_of(rest), weights_of(whole))
        else:
            torch.testing.assert_close(weights_of(rest), weights_of(whole), rtol=1e-12, atol=1e-12)


@pytest.mark.slow_cases("DDP", "FSDP2")
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_a_run_that_is_cut_off_goes_on_with_the_same_bits(tmp_path, engine) -> None:
    whole = run(2, tmp_path / "whole", NUM_STEPS, engine)
    run(2, tmp_path / "parts", CUT, engine, checkpoint={"asynchronous": engine == "FSDP2"})
    rest = run(2, tmp_path / "parts", NUM_STEPS, engine)
    assert torch.equal(weights_of(rest), weights_of(whole))


# CI: each engine, and each place.
@pytest.mark.soak_cases("False-DDP", "True-FSDP2")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_several_processes_resume_from_a_snapshot_in_memory(tmp_path, engine, asynchronous) -> None:
    (tmp_path / "memory").mkdir()
    memory = {"steps": 1, "path": str(tmp_path / "memory")}
    checkpoint = {"checkpoint": {"asynchronous": asynchronous, "memory": memory}}
    options = {"save": CUT, **checkpoint}
    whole = run(2, tmp_path / "whole", NUM_STEPS, engine)
    with pytest.raises(AssertionError, match="crash at step 6"):
        run(2, tmp_path / "parts", NUM_STEPS, engine, **options, crash=6)
    found = [read_manifest(path).step for path in (tmp_path / "memory").glob("*/*/memory_*")]
    assert sorted(found) == [4, 5]
    rest = run(2, tmp_path / "parts", NUM_STEPS, engine, **options)
    assert len(rest["grads"]) == NUM_STEPS - 5
    assert torch.equal(weights_of(rest), weights_of(whole))
    assert list((tmp_path / "memory").glob("*/*")) == []


@pytest.mark.slow
def test_several_processes_know_whether_a_run_of_num_steps_has_finished(tmp_path) -> None:
    def more(num_steps: int) -> int:
        given = {"num_steps": num_steps, "epochs": None, "save": 1}
        found = run_ranks(2, train, tmp_path, GLOBAL_BATCH // 2, given)
        assert found[0]["step"] == found[1]["step"]
        return found[0]["step"]

    assert [more(2), more(3)] == [2, 5]
    (tmp_path / ".finished.json").unlink()  # what a kill before the end would leave
    assert [more(3), more(1)] == [5, 6]


@pytest.mark.slow
def test_what_one_process_saved_several_go_on_from(tmp_path) -> None:
    whole = run(1, tmp_path / "whole", NUM_STEPS, "FSDP2")
    run(1, tmp_path / "parts", CUT, "FSDP2")
    rest = run(3, tmp_path / "parts", NUM_STEPS, "FSDP2")
    torch.testing.assert_close(weights_of(rest), weights_of(whole), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_each_process_has_its_own_random_state_in_it(tmp_path) -> None:
    run(2, tmp_path, CUT, "DDP")
    rng = load(tmp_path / f"checkpoint_{CUT}")["rng"]
    assert rng["world_size"] == 2
    assert {"host_0", "host_1"} <= set(rng)
