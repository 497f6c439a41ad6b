import datetime
import io
import json
import multiprocessing
import os
import pickle
import random
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor import zeros as sharded_zeros

from modelzoo_trainer import CheckpointError, CheckpointMismatch, checkpointing
from modelzoo_trainer.checkpointing import disk, sharded
from modelzoo_trainer.checkpointing.distributed import (
    CheckpointReader,
    CheckpointWriter,
    load_into,
    load_like,
    save_sharded,
)
from modelzoo_trainer.checkpointing.manifest import record_of
from modelzoo_trainer.tools.checkpoints.compare import compare

BIG = torch.arange(35.0).reshape(7, 5)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_processes(num, work, folder, *args):
    """Run `work(rank, folder, *args)` in forked processes of one gloo group; raise what they do."""
    context = multiprocessing.get_context("fork")
    store = tempfile.mktemp(prefix="store-", dir=folder)
    processes = [
        context.Process(target=_process, args=(rank, num, store, work, folder, *args))
        for rank in range(num)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    failures = [Path(f"{store}-{rank}") for rank in range(num)]
    assert not any(file.exists() for file in failures), "\n".join(
        file.read_text() for file in failures if file.exists()
    )
    assert [process.exitcode for process in processes] == [0] * num


def _process(rank, num, store, work, folder, *args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num,
            timeout=datetime.timedelta(seconds=60),
        )
        work(rank, folder, *args)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  # the parent raises it
        Path(f"{store}-{rank}").write_text(f"process {rank}:\n{traceback.format_exc()}")
    os._exit(0)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def state_of(rank):
    """A state as a run of several processes has it."""
    return {
        "model": {
            "rows": distribute_tensor(BIG, mesh(), [Shard(0)]),
            "columns": distribute_tensor(BIG.to(torch.bfloat16), mesh(), [Shard(1)]),
            "few": distribute_tensor(BIG[:1], mesh(), [Shard(0)]),
            "whole": distribute_tensor(BIG, mesh(), [Replicate()]),
            "plain": torch.arange(4),
        },
        "optimizer": {"state": {0: {"exp_avg": distribute_tensor(-BIG, mesh(), [Shard(0)])}}},
        "global_step": 3,
        "rng": {f"rank-{rank}": (rank, [1, 2, rank], np.arange(3) + rank)},
    }


WHOLE = {
    "model": {
        "rows": BIG,
        "columns": BIG.to(torch.bfloat16),
        "few": BIG[:1],
        "whole": BIG,
        "plain": torch.arange(4),
    },
    "optimizer": {"state": {0: {"exp_avg": -BIG}}},
    "global_step": 3,
    "rng": {f"rank-{rank}": (rank, [1, 2, rank], np.arange(3) + rank) for rank in range(2)},
}


WHOLE_FILES = ("whole-00000.safetensors", "whole-00001.safetensors")


def save(rank, folder):
    save_sharded(folder / "checkpoint_3", state_of(rank), step=3, facts={"run": "a"})


def load_own_blocks(rank, folder):
    opened, read = set(), sharded.checked_tensors

    def checked_tensors(file, *given):
        opened.add(file.name)
        return read(file, *given)

    sharded.checked_tensors = checked_tensors
    like = state_of(rank)
    found = load_like(
        folder / "checkpoint_3",
        {"model": like["model"], "optimizer": {"state": {0: like["model"]["rows"]}}},
    )
    assert opened == {f"shard-{rank:05d}.safetensors", *WHOLE_FILES}
    assert torch.equal(found["model"]["rows"].full_tensor(), BIG)
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"].full_tensor(), -BIG)
    assert compare(WHOLE["rng"], found["rng"]) == []


def load_in_parts(rank, folder):
    target = {
        "model": {
            "rows": sharded_zeros(7, 5, device_mesh=mesh(), placements=[Shard(1)]),
            "columns": sharded_zeros(
                7, 5, dtype=torch.bfloat16, device_mesh=mesh(), placements=[Shard(0)]
            ),
            "plain": torch.zeros(4, dtype=torch.int64),
        }
    }
    state = load_into(folder / "checkpoint_3", target)
    assert state["model"]["plain"] is target["model"]["plain"]
    for name in ("rows", "columns"):
        assert state["model"][name] is target["model"][name]
        state["model"][name] = target["model"][name].full_tensor()
    assert compare(WHOLE, state) == []


# ---- several processes


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_process_reads_its_own_blocks_only(tmp_path):
    in_processes(2, save, tmp_path)
    in_processes(2, load_own_blocks, tmp_path)


@pytest.mark.ranks(2)
def test_what_two_processes_save_loads_whole_in_one(tmp_path):
    in_processes(2, save, tmp_path)
    path = tmp_path / "checkpoint_3"
    assert checkpointing.verify(path) == []
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "shards.json",
        "values-00000.json",
        "values-00001.json",
        *WHOLE_FILES,
    ]
    assert checkpointing.read_manifest(path).facts == {"run": "a"}
    assert compare(WHOLE, checkpointing.load(path)) == []
    assert compare(WHOLE, load_into(path, {})) == []


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_what_two_processes_save_loads_in_four_with_other_parts(tmp_path):
    in_processes(2, save, tmp_path)
    in_processes(4, load_in_parts, tmp_path)


@pytest.mark.ranks(2)
def test_what_one_process_saves_loads_in_two(tmp_path):
    checkpointing.save(tmp_path / "checkpoint_3", WHOLE, step=3)
    in_processes(2, load_in_parts, tmp_path)


def save_tied(rank, folder):
    # Of 2 rows, the third process has none.
    weight = distribute_tensor(torch.arange(20.0).reshape(2, 10), mesh(), [Shard(0)])
    like = weight.clone()
    model = {"head.weight": weight, "like.weight": like, "token_embeddings.weight": weight.detach()}
    save_sharded(folder / "checkpoint_1", {"model": model}, step=1)


@pytest.mark.ranks(3)
def test_what_is_tied_over_processes_comes_back_and_is_exported_tied(tmp_path):
    in_processes(3, save_tied, tmp_path)
    model = checkpointing.load(tmp_path / "checkpoint_1")["model"]
    assert model["head.weight"] is model["token_embeddings.weight"]
    assert model["head.weight"] is not model["like.weight"]
    assert torch.equal(model["head.weight"], torch.arange(20.0).reshape(2, 10))
    checkpointing.export(tmp_path / "checkpoint_1", tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert [*file.keys()] == ["head.weight", "like.weight"]
        assert file.metadata()["token_embeddings.weight"] == "head.weight"


def save_and_load_with_torchs_planners(rank, folder):
    path = folder / "checkpoint_1"
    weight = distribute_tensor(BIG, mesh(), [Shard(0)])
    dcp.save({"model": {"w": weight}, "n": 5}, storage_writer=CheckpointWriter(path, step=1))
    target = {
        "model": {"w": sharded_zeros(7, 5, device_mesh=mesh(), placements=[Shard(1)])},
        "n": 0,
    }
    dcp.load(target, storage_reader=CheckpointReader(path))
    assert torch.equal(target["model"]["w"].full_tensor(), BIG)
    assert target["n"] == 5


@pytest.mark.ranks(2)
def test_torchs_own_planners_save_and_load(tmp_path):
    in_processes(2, save_and_load_with_torchs_planners, tmp_path)
    loaded = checkpointing.load(tmp_path / "checkpoint_1")
    assert compare({"model": {"w": BIG}, "n": 5}, loaded) == []


def save_in_the_background(rank, folder):
    weight = distribute_tensor(BIG, mesh(), [Shard(0)])
    writer = CheckpointWriter(folder / "checkpoint_1", step=1)
    saving = dcp.async_save({"w": weight}, storage_writer=writer)
    weight.to_local().zero_()
    saving.result()


@pytest.mark.ranks(2)
def test_an_asynchronous_save_keeps_what_was_there_when_it_began(tmp_path):
    in_processes(2, save_in_the_background, tmp_path)
    assert compare({"w": BIG}, checkpointing.load(tmp_path / "checkpoint_1")) == []


def save_a_sharded_tensor(rank, folder):
    from torch.distributed._shard.sharded_tensor import Shard as Part
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    begin, end = (0, 3) if rank == 0 else (3, 7)
    part = Part.from_tensor_and_offsets(BIG[begin:end].clone(), [begin, 0], rank)
    state = {"w": init_from_local_shards([part], 7, 5)}
    save_sharded(folder / "checkpoint_1", state, step=1)
    part.tensor.zero_()
    load_into(folder / "checkpoint_1", state)
    assert torch.equal(part.tensor, BIG[begin:end])


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_the_older_kind_of_sharded_tensors_is_saved_and_loaded(tmp_path):
    in_processes(2, save_a_sharded_tensor, tmp_path)
    assert compare({"w": BIG}, checkpointing.load(tmp_path / "checkpoint_1")) == []


def save_what_cannot_be_saved_in_the_second(rank, folder):
    state = state_of(rank) | {f"mine-{rank}": {1, 2} if rank == 1 else 0}
    with pytest.raises(CheckpointError, match=r"in process 1: mine-1 is a set, which cannot be"):
        save_sharded(folder / "all" / "checkpoint_3", state, step=3)


@pytest.mark.ranks(2)
def test_if_one_process_cannot_encode_its_state_nothing_is_left(tmp_path):
    in_processes(2, save_what_cannot_be_saved_in_the_second, tmp_path)
    assert list((tmp_path / "all").iterdir()) == []


def save_onto_a_full_disk(rank, folder, failing):
    def refuse(fd, view):
        raise OSError(28, "No space left on device")

    if rank == failing:
        disk.write = refuse  # of this process alone
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        save_sharded(folder / "all" / "checkpoint_3", state_of(rank), step=3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_if_the_disk_refuses_one_process_nothing_is_left(tmp_path, failing):
    in_processes(2, save_onto_a_full_disk, tmp_path, failing)
    assert list((tmp_path / "all").iterdir()) == []


def lose_the_second_process(rank, folder):
    def die(fd, view):
        os._exit(0)

    if rank == 1:
        disk.write = die  # of this process alone
    with pytest.raises(RuntimeError):  # of gloo
        save_sharded(folder / "all" / "checkpoint_3", state_of(rank), step=3)
    os._exit(0)


@pytest.mark.ranks(2)
def test_if_a_process_is_lost_nothing_is_left(tmp_path):
    in_processes(2, lose_the_second_process, tmp_path)
    assert list((tmp_path / "all").iterdir()) == []


def load_a_damaged_one(rank, folder):
    target = {"model": {"rows": sharded_zeros(7, 5, device_mesh=mesh(), placements=[Shard(0)])}}
    with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors.* is damaged"):
        load_into(folder / "checkpoint_3", target)
    assert not target["model"]["rows"].to_local().any()
    target = {"model": {"rows": target["model"]["rows"]}}  # each needs its own shard alone
    with pytest.raises(dcp.CheckpointException, match=r"shard-00001\.safetensors.* is damaged"):
        dcp.load(target, storage_reader=CheckpointReader(folder / "checkpoint_3"))
    assert not target["model"]["rows"].to_local().any()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_damage_that_one_process_finds_keeps_all_from_changing_anything(tmp_path):
    in_processes(2, save, tmp_path)
    flip(tmp_path / "checkpoint_3" / "shard-00001.safetensors", -1)
    in_processes(2, load_a_damaged_one, tmp_path)


# ---- one process


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def path(tmp_path):
    model, optimizer = train()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "global_step": 3}
    save_sharded(tmp_path / "checkpoint_3", state, step=3)
    return tmp_path / "checkpoint_3"


def test_model_and_optimizer_come_back(path):
    model, optimizer = train()
    state = checkpointing.load(path)
    wanted = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "global_step": 3}
    assert compare(wanted, state) == []
    optimizer.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])


def test_containers_and_values_come_back_with_their_types(tmp_path):
    state = {
        "ints": {0: 1, -5: {"a": torch.zeros(2)}, "0 ": 1 << 80},
        "empty": [{}, [], (), {"a": {}}],
        "tuple": (torch.ones(2), [torch.zeros(()), ({"b": torch.ones(1)},)], 5),
        "plain": [1, (2.5, float("nan"), -0.0), None, True, "\ud800", b"\x00\xff"],
        "numpy": {"a": np.arange(6.0).reshape(2, 3), "s": np.float32(1.5)},
        "a.b": {"c": 1},
        "__type__": {"__type__": "tensor"},
    }
    save_sharded(tmp_path / "checkpoint_1", state, step=1)
    loaded = checkpointing.load(tmp_path / "checkpoint_1")
    assert compare(state, loaded) == []
    assert list(loaded) == list(state)
    assert compare(state, load_into(tmp_path / "checkpoint_1", {})) == []


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
        *("complex64", "complex128"),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_every_dtype_and_layout_of_memory_comes_back(tmp_path, dtype):
    dtype = getattr(torch, dtype)
    base = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    state = {
        "t": [base, base[0, 0, 0], base[:, :0], base.permute(2, 0, 1), base[:, ::2, 1:3]],
        "conj": base.conj() if dtype.is_complex else base,
        "tuple": (base[0],),
    }
    save_sharded(tmp_path / "checkpoint_1", state, step=1)
    assert compare(state, checkpointing.load(tmp_path / "checkpoint_1")) == []
    target = {"t": [torch.zeros_like(tensor) for tensor in state["t"]]}
    assert compare(state, load_into(tmp_path / "checkpoint_1", target)) == []
    assert compare({"t": state["t"]}, target) == []


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.randn(1000)
    save_sharded(tmp_path / "checkpoint_1", {"a": weight, "b": {"c": weight}}, step=1)
    assert (tmp_path / "checkpoint_1" / "shard-00000.safetensors").stat().st_size < 5000
    state = checkpointing.load(tmp_path / "checkpoint_1")
    assert state["a"] is state["b"]["c"]


def test_two_entries_of_one_name_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"two entries .*'a\.b'"):
        save_sharded(tmp_path / "checkpoint_1", {"a.b": 1, "a": {"b": 2}}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_use_is_refused_and_stays(path):
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CheckpointError, match="exists; checkpoints are never overwritten"):
        save_sharded(path, {"a": 1}, step=3)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint_3"]


def test_what_does_not_fit_is_listed_and_nothing_is_changed(path):
    target = {
        "model": {
            "0.weight": torch.zeros(3, 4),
            "0.bias": torch.zeros(4),
            "2.bias": torch.zeros(1, dtype=torch.float64),
            "3.bias": torch.zeros(1),
        }
    }
    with pytest.raises(CheckpointMismatch) as raised:
        load_into(path, target)
    assert str(raised.value).splitlines()[1:] == [
        "  model.0.bias: float32 [3] in the checkpoint, float32 [4] in this run",
        "  model.2.bias: float32 [1] in the checkpoint, float64 [1] in this run",
        "  model.3.bias: not in the checkpoint",
    ]
    assert not target["model"]["0.weight"].any()


def test_torchs_planner_does_not_cast_silently(path):
    target = {"model": {"0.bias": torch.zeros(3, dtype=torch.int64)}}
    with pytest.raises(
        dcp.CheckpointException, match=r"torch\.float32 of shape \[3\] in the checkpoint"
    ):
        dcp.load(target, storage_reader=CheckpointReader(path))


def test_plans_of_an_earlier_save_are_refused(tmp_path):
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    state = {"a": torch.ones(1)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "1", step=1), planner=planner)
    second = CheckpointWriter(tmp_path / "2", step=2)
    with pytest.raises(dcp.CheckpointException, match="enable_plan_caching"):
        dcp.save(state, storage_writer=second, planner=planner)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


# ---- damage


def test_every_flipped_bit_is_found_and_nothing_is_changed(path):
    chance = random.Random(0)
    files = sorted(path.iterdir())
    target = {"model": {"0.weight": torch.zeros(3, 4)}}
    for _ in range(100):
        file = chance.choice(files)
        before = file.read_bytes()
        damaged = bytearray(before)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_into(path, target)
        with pytest.raises(CheckpointError):
            checkpointing.load(path)
        file.write_bytes(before)
    assert not target["model"]["0.weight"].any()


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "values-00000.json", "shards.json"])
def test_a_missing_truncated_or_linked_file_is_named(path, name, tmp_path):
    file = path / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"'{name}' has \d+ bytes, expected "):
        load_into(path, {})
    file.unlink()
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        load_into(path, {})
    (tmp_path / "elsewhere").write_bytes(content)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"'{name}' is not a regular file"):
        load_into(path, {})


def test_an_extra_file_is_refused(path):
    (path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"'\.metadata' is not in the manifest"):
        load_into(path, {})


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("ran",))


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize(
    "name", ["shard-00000.safetensors", "values-00000.json", "shards.json", "manifest.json"]
)
@pytest.mark.slow_cases(every=4)
def test_a_pickle_in_place_of_a_file_never_runs(path, name, how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = io.BytesIO()
    torch.save(Payload(), content) if how == "torch.save" else pickle.dump(Payload(), content)
    (path / name).write_bytes(content.getvalue())
    with pytest.raises(CheckpointError):
        load_into(path, {})
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"global_step": 0}, storage_reader=CheckpointReader(path))
    assert not Path("ran").exists()


def test_nothing_in_a_checkpoint_is_a_pickle_even_with_torchs_planner(tmp_path):
    state = {"a": torch.ones(2), "b": {"c": (1, "x")}}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "1", step=1))
    for file in (tmp_path / "1").glob("*.json"):
        json.loads(file.read_text(encoding="ascii"))
    names = sorted(file.name for file in (tmp_path / "1").iterdir())
    assert names == ["manifest.json", "shard-00000.safetensors", "shards.json", "values-00000.json"]


def reseal(path, name, content):
    """Write another content of a file, and a manifest that says it is right."""
    (path / name).write_bytes(content)
    manifest = checkpointing.read_manifest(path)
    files = manifest.files | {name: record_of(path / name)}
    (path / "manifest.json").write_text(replace(manifest, files=files).to_json())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda index: index.pop("paths"), "cannot be read"),
        (lambda index: index["paths"].pop(), "paths do not match"),
        (lambda index: index["paths"][0].__setitem__(1, []), "does not start in a dict"),
        (
            lambda index: index["paths"][0][1][0].__setitem__(0, "x"),
            "invalid key 'model' or kind 'x'",
        ),
        (
            lambda index: index["paths"][0][1].__setitem__(1, ["l", -1]),
            "invalid key -1 or kind 'l'",
        ),
        (
            lambda index: index["paths"][1].__setitem__(1, index["paths"][0][1]),
            "entry '.*' is listed twice",
        ),
        (
            lambda index: index["paths"][0].__setitem__(1, [["k", "model"]]),
            "is inside another entry",
        ),
        (
            lambda index: index["tensors"]["model.0.bias"].update(shape=[4]),
            "have 3 values, but its shape has 4",
        ),
        (
            lambda index: index["tensors"]["model.0.bias"].update(shape=[1 << 64]),
            "is not an integer >= 0",
        ),
        (
            lambda index: index["tensors"]["model.0.bias"].update(dtype="float64"),
            "as torch.float32",
        ),
        (
            lambda index: index["tensors"]["model.0.bias"].update(dtype="save"),
            "dtype 'save', which PyTorch",
        ),
        (lambda index: chunk(index).__setitem__(0, [1]), "outside of the tensor's shape"),
        (lambda index: chunk(index).__setitem__(2, "../x.safetensors"), "manifest does not list"),
        (
            lambda index: chunk(index).__setitem__(2, "shards.json"),
            "'shards.json' as a file of tensors",
        ),
        (lambda index: chunk(index).__setitem__(3, "nothing"), "lacks the tensor 'nothing'"),
        (lambda index: index["values"].update(global_step="shards.json"), "cannot be read"),
        (lambda index: index["values"].update(global_step="/etc/passwd"), "manifest does not list"),
    ],
)
def test_an_index_that_does_not_describe_the_files_is_refused(path, change, says):
    index = json.loads((path / "shards.json").read_text())
    change(index)
    reseal(path, "shards.json", json.dumps(index).encode())
    assert checkpointing.verify(path) == []
    for load in (checkpointing.load, lambda path: load_into(path, {})):
        with pytest.raises(CheckpointError, match=says):
            load(path)


def chunk(index):
    return index["tensors"]["model.0.bias"]["chunks"][0]


@pytest.mark.slow
def test_files_that_were_made_up_raise_nothing_but_the_one_error(path):
    chance = random.Random(0)
    num_refused = 0
    for name in ("shards.json", "values-00000.json", "shard-00000.safetensors"):
        whole = (path / name).read_bytes()
        for _ in range(150):
            made_up = bytearray(whole)
            made_up[chance.randrange(min(len(whole), 1500))] = chance.choice(
                b'0159[]{}",:-aketl\xff'
            )
            reseal(path, name, made_up)
            try:
                checkpointing.load(path)
            except CheckpointError:
                num_refused += 1
        reseal(path, name, whole)
    assert num_refused > 200
