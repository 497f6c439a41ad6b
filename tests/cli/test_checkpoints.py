import json
import os
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.distributed import save_sharded
from modelzoo_trainer.cli.checkpoints import main

WEIGHT = torch.arange(6.0).reshape(2, 3)


def state_of(step, weight=WEIGHT):
    return {"model": {"w": weight, "b": torch.zeros(2, dtype=torch.bfloat16)}, "global_step": step}


@pytest.fixture
def run(tmp_path):
    for step in (9, 10, 100):
        checkpointing.save(
            tmp_path / f"checkpoint_{step}", state_of(step), step=step, facts={"run": "a"}
        )
    return tmp_path


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def called(capsys, *argv):
    """Run a command; return its exit code, lines of output and lines of complaints."""
    code = main([str(argument) for argument in argv])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


# ---- list


def test_list_shows_the_oldest_step_first(run, capsys):
    code, out, err = called(capsys, "list", run)
    assert (code, err) == (0, [])
    assert [line.split()[:2] for line in out] == [
        ["name", "step"],
        ["checkpoint_9", "9"],
        ["checkpoint_10", "10"],
        ["checkpoint_100", "100"],
    ]
    assert all(line.endswith("complete") for line in out[1:])
    assert re.search(r"\d (B|kB)  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", out[1])


def test_list_with_verify_reads_all_and_finds_a_flipped_bit(run, capsys):
    flip(run / "checkpoint_10" / "model.safetensors")
    assert called(capsys, "list", run)[0] == 0
    code, out, _ = called(capsys, "list", "--verify", run)
    assert code == 1
    assert out[1].endswith("intact")
    assert re.search(r"model\.safetensors'.* is damaged", out[2])


def test_list_shows_what_is_uncommitted_damaged_or_left_over(run, capsys):
    (run / ".tmp-checkpoint_101-1-ab").mkdir()
    (run / ".trash-checkpoint_8-ab").mkdir()
    (run / "logs").mkdir()
    (run / "checkpoint_9" / "manifest.json").unlink()
    (run / "checkpoint_10" / "model.safetensors").write_bytes(b"")
    code, out, _ = called(capsys, "list", run)
    assert code == 1
    text = {line.split()[0]: line for line in out[1:]}
    assert text.keys() == {
        ".tmp-checkpoint_101-1-ab",
        ".trash-checkpoint_8-ab",
        "checkpoint_9",
        "checkpoint_10",
        "checkpoint_100",
    }
    assert "uncommitted" in text[".tmp-checkpoint_101-1-ab"]
    assert "partly deleted" in text[".trash-checkpoint_8-ab"]
    assert "no manifest.json" in text["checkpoint_9"]
    assert "'model.safetensors' has 0 bytes, expected " in text["checkpoint_10"]


def test_leftovers_alone_are_no_damage(tmp_path, capsys):
    (tmp_path / ".tmp-checkpoint_1-1-ab").mkdir()
    assert called(capsys, "list", tmp_path)[0] == 0


def test_list_of_an_empty_folder_says_so(tmp_path, capsys):
    assert called(capsys, "list", tmp_path) == (0, ["no checkpoints"], [])


def test_list_of_a_checkpoint_shows_it_alone(run, capsys):
    code, out, _ = called(capsys, "list", run / "checkpoint_10")
    assert code == 0
    assert [line.split()[0] for line in out] == ["name", "checkpoint_10"]


# ---- info


def test_info_shows_the_tensors_without_reading_them(run, capsys):
    path = run / "checkpoint_10"
    flip(path / "model.safetensors")
    code, out, err = called(capsys, "info", path)
    assert (code, err) == (0, [])
    assert out[-3:] == [
        "tensor   dtype     shape   size",
        "model.b  bfloat16  [2]      4 B",
        "model.w  float32   [2, 3]  24 B",
    ]
    pairs = dict(line.split(maxsplit=1) for line in out[:5])
    assert pairs["step"] == "10"
    assert pairs["path"] == str(path)
    assert 'fact run  "a"' in out
    assert any(line.startswith("versions") and "torch" in line for line in out)


def test_info_as_json_has_it_all(run, capsys):
    code, out, _ = called(capsys, "info", "--json", run / "checkpoint_10")
    found = json.loads("\n".join(out))
    assert code == 0
    assert found["step"] == 10
    assert found["problems"] == []
    assert found["facts"] == {"run": "a"}
    assert found["files"].keys() == {"model.safetensors", "state.json"}
    assert found["tensors"][1] == {
        "name": "model.w",
        "dtype": "float32",
        "shape": [2, 3],
        "num_bytes": 24,
    }


def test_info_shows_whole_tensors_of_a_checkpoint_in_shards(tmp_path, capsys):
    save_sharded(tmp_path / "checkpoint_1", state_of(1), step=1)
    code, out, _ = called(capsys, "info", tmp_path / "checkpoint_1")
    assert code == 0
    assert out[-1] == "model.w  float32   [2, 3]  24 B"


def test_info_of_a_damaged_one_tells_what_is_missing(run, capsys):
    (run / "checkpoint_10" / "model.safetensors").unlink()
    code, out, err = called(capsys, "info", run / "checkpoint_10")
    assert code == 1
    assert out[1].split() == ["step", "10"]
    assert err == ["checkpoint_10: 'model.safetensors' is missing"]


def test_info_of_what_is_no_checkpoint_is_one_line(tmp_path, capsys):
    code, out, err = called(capsys, "info", tmp_path)
    assert (code, out) == (1, [])
    assert len(err) == 1
    assert "has no manifest.json" in err[0]


# ---- verify


def test_verify_reads_one_or_many(run, capsys):
    code, out, err = called(capsys, "verify", run / "checkpoint_9", run)
    assert (code, err) == (0, [])
    assert [line.split(":")[0].split("/")[-1] for line in out] == [
        *("checkpoint_9", "checkpoint_9", "checkpoint_10", "checkpoint_100"),
    ]
    assert "intact (step 9, " in out[0]


def test_verify_has_one_line_for_each_problem(run, capsys):
    flip(run / "checkpoint_10" / "model.safetensors")
    (run / "checkpoint_10" / "extra").write_bytes(b"")
    (run / "checkpoint_100" / "state.json").unlink()
    code, out, err = called(capsys, "verify", run)
    assert code == 1
    assert len(out) == 1
    assert len(err) == 3
    assert sorted(line.split(": ")[0].split("/")[-1] for line in err) == [
        *("checkpoint_10", "checkpoint_10", "checkpoint_100")
    ]


def test_verify_of_nothing_is_wrong_use(tmp_path, capsys):
    code, out, err = called(capsys, "verify", tmp_path)
    assert (code, out, err) == (2, [], [f"'{tmp_path}' has no checkpoints."])


# ---- diff


def test_equal_checkpoints_are_equal_whoever_wrote_them(run, tmp_path, capsys):
    save_sharded(tmp_path / "other", state_of(10), step=10)
    answer = called(capsys, "diff", run / "checkpoint_10", tmp_path / "other")
    assert answer == (0, ["bitwise equal"], [])


def test_what_differs_is_listed(run, capsys):
    changed = state_of(10, WEIGHT + torch.eye(2, 3))
    checkpointing.save(run / "other", changed | {"x": 1}, step=10)
    code, out, err = called(capsys, "diff", run / "checkpoint_9", run / "other")
    assert (code, err) == (1, [])
    assert out == [
        "changed  global_step: 9 -> 10",
        "changed  model.w: 2 of 6 values of float32 [2, 3], by up to 1",
        "added    x: 1",
        "2 changed, 1 added",
    ]


def test_one_part_is_compared_alone(run, capsys):
    paths = run / "checkpoint_9", run / "checkpoint_10"
    assert called(capsys, "diff", *paths)[0] == 1
    assert called(capsys, "diff", *paths, "--key", "model")[0] == 0
    code, _, err = called(capsys, "diff", *paths, "--key", "nothing")
    assert code == 1
    assert "has no key 'nothing'" in err[0]


# ---- export


def test_export_writes_the_model(run, tmp_path, capsys):
    file = tmp_path / "m.safetensors"
    code, out, err = called(capsys, "export", run / "checkpoint_10", file)
    assert (code, err) == (0, [])
    assert out[0].startswith(f"{file}: ")
    assert torch.equal(safetensors.torch.load_file(file)["w"], WEIGHT)
    code, _, err = called(capsys, "export", run / "checkpoint_10", file)
    assert code == 2
    [line] = err
    assert f"'{file}'" in line
    assert "--force" in line
    assert called(capsys, "export", "--force", run / "checkpoint_10", file)[0] == 0


# ---- delete


def test_delete_removes_what_it_is_told_to(run, capsys):
    code, out, err = called(capsys, "delete", run / "checkpoint_9", run / "checkpoint_100")
    assert (code, err) == (0, [])
    assert len(out) == 2
    assert [entry.name for entry in run.iterdir()] == ["checkpoint_10"]


def test_the_only_intact_one_is_deleted_only_with_yes(run, capsys):
    (run / "checkpoint_9" / "state.json").unlink()
    paths = run / "checkpoint_10", run / "checkpoint_100"
    code, out, err = called(capsys, "delete", *paths)
    assert (code, out) == (2, [])
    assert "'checkpoint_10'" in err[0]
    assert "--yes" in err[0]
    assert all(path.is_dir() for path in paths)
    assert called(capsys, "delete", "--yes", *paths)[0] == 0
    assert [entry.name for entry in run.iterdir()] == ["checkpoint_9"]


def test_a_damaged_one_is_deleted_without_yes(tmp_path, capsys):
    checkpointing.save(tmp_path / "checkpoint_1", state_of(1), step=1)
    (tmp_path / "checkpoint_1" / "state.json").unlink()
    assert called(capsys, "delete", tmp_path / "checkpoint_1")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_one_whose_manifest_is_gone_is_deleted(run, capsys):
    (run / "checkpoint_9" / "manifest.json").unlink()
    assert called(capsys, "delete", run / "checkpoint_9")[0] == 0
    assert not (run / "checkpoint_9").exists()


def test_delete_refuses_what_is_being_written(run, capsys):
    (run / ".tmp-checkpoint_101-1-abcdef01").mkdir()
    code, _, err = called(capsys, "delete", run / ".tmp-checkpoint_101-1-abcdef01")
    assert code == 2
    assert "was not deleted: it is uncommitted" in err[0]


def test_delete_refuses_what_is_no_checkpoint(run, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_bytes(b"")
    code, _, err = called(capsys, "delete", run / "checkpoint_9", tmp_path / "data")
    assert code == 2
    assert "was not deleted" in err[0]
    assert (tmp_path / "data" / "mine").exists()
    assert (run / "checkpoint_9").exists()


def test_delete_refuses_a_link(run, tmp_path, capsys):
    (tmp_path / "link").symlink_to(run / "checkpoint_9")
    code, _, err = called(capsys, "delete", "--yes", tmp_path / "link")
    assert code == 2
    assert "is a symbolic link. Pass the checkpoint itself: " in err[0]
    assert (run / "checkpoint_9" / "manifest.json").exists()


def test_latest_stands_for_the_checkpoint_that_it_points_to(run, tmp_path, capsys):
    (run / "latest").symlink_to("checkpoint_9")
    assert called(capsys, "verify", run / "latest")[1][0].startswith(
        f"{run / 'checkpoint_9'}: intact"
    )
    assert called(capsys, "info", run / "latest")[0] == 0
    assert called(capsys, "export", run / "latest", tmp_path / "x.safetensors")[0] == 0


def test_latest_points_to_what_is_left_after_a_deletion(run, capsys):
    (run / "latest").symlink_to("checkpoint_9")
    assert called(capsys, "delete", run / "latest")[0] == 2
    assert called(capsys, "delete", run / "checkpoint_9")[0] == 0
    left = checkpointing.list_checkpoints(run)
    assert os.readlink(run / "latest") == left[-1].path.name
    called(capsys, "delete", "--yes", *[info.path for info in left])
    assert not os.path.lexists(run / "latest")


# ---- the command line


@pytest.mark.parametrize("command", ["list", "info", "verify", "delete"])
def test_a_path_that_is_not_there_is_wrong_use(tmp_path, capsys, command):
    code, out, err = called(capsys, command, tmp_path / "nothing")
    assert (code, out, err) == (2, [], [f"'{tmp_path}/nothing' does not exist."])


@pytest.mark.parametrize("argv", [[], ["show"], ["diff", "a"], ["export", "a"], ["info"]])
def test_a_command_that_is_none_is_wrong_use(argv):
    with pytest.raises(SystemExit, match="2"):
        main(argv)


def test_damaged_manifests_give_one_line_and_no_traceback(run, capsys):
    for text in ("", "[]", "[" * 100_000, '{"format_version": 99}', "\x00"):
        (run / "checkpoint_10" / "manifest.json").write_text(text)
        for command in ("info", "verify", "list", "diff"):
            paths = [run / "checkpoint_10"] * (2 if command == "diff" else 1)
            code, out, err = called(capsys, command, *paths)
            assert code == 1
            assert len(out) + len(err) == (2 if command == "list" else 1)


def test_help_has_an_example_of_each_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for command in ("list", "info", "verify", "diff", "export", "delete"):
        assert f"modelzoo-trainer checkpoint {command} runs/" in out


@pytest.mark.parametrize("command", ["list", "info"])
def test_it_answers_without_torch(run, command):
    code = (
        "import sys; from modelzoo_trainer.cli.checkpoints import main;"
        "code = main(sys.argv[1:]); sys.exit(3 if 'torch' in sys.modules else code)"
    )
    argv = [sys.executable, "-c", code, command, str(run / "checkpoint_10")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_who_has_had_enough_is_no_failure(run):
    command = f"{sys.executable} -m modelzoo_trainer checkpoint list {run} | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
