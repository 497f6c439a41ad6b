"""The published configurations: every one is checked, and trained with a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import register_global_callback
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.loader import read_file, to_yaml
from modelzoo_trainer.config.positions import to_plain
from tests.compat.corpus_doubles import Watch
from tests.compat.corpus_expected import decays_at, only, rates_at, telling_steps, value_at
from tests.compat.corpus_here import CONFIGURATIONS
from tests.compat.corpus_short import (
    NUM_STEPS,
    checkpoints_of,
    names_of_sparse,
    parts_of,
    shortened,
)

ROOT = Path(__file__).resolve().parents[2]


def section_of(path: Path) -> dict[str, Any]:
    return to_plain(read_file(path))["trainer"]


TRAINERS = {path: section_of(path) for path in sorted(CONFIGURATIONS.rglob("*.yaml"))}
ALL = [pytest.param(path, id=path.stem) for path in TRAINERS]
WITH_FIT = [pytest.param(path, id=path.stem) for path, given in TRAINERS.items() if "fit" in given]
FOR_CSX = [
    pytest.param(path, id=path.stem)
    for path, given in TRAINERS.items()
    if "backend" in given["init"]
]
SOME = ALL[:: max(1, len(ALL) // 3)]

pytestmark = pytest.mark.corpus


def check(path: Path, *options: str) -> int:
    return main(["--params", str(path), "--check", *options])


def close_to(values: Any) -> Any:
    """Return what equals `values` but for rounding; learning rates may be as small as 1e-10."""
    return pytest.approx(values, rel=1e-9, abs=1e-18)


def as_yaml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def found_in(text: str, pattern: str) -> list[str]:
    return re.findall(pattern, text, re.MULTILINE)


# ---- checked


def test_the_corpus_is_whole():
    assert [len(ALL), len(WITH_FIT), len(FOR_CSX)] == [78, 77, 75]


@pytest.mark.parametrize("path", ALL)
def test_a_published_file_is_right_and_its_report_names_what_it_has(path, capfd):
    init = TRAINERS[path]["init"]
    assert check(path, "--device", "cpu") == 2  # its data are not here
    shown = capfd.readouterr().out
    assert not shown.splitlines()[-1].endswith("s here.")
    assert shown.startswith(f"{path} is valid (nothing was built).\n")
    assert [name.lower() for name in found_in(shown, r"^  optimizer: (\w+)")] == [
        name.lower() for name in init.get("optimizer", {})
    ]
    assert found_in(shown, r"^  schedulers\[\d+\]: (\w+)$") == [
        only(schedule)[0] for schedule in init.get("schedulers", [])
    ]
    assert found_in(shown, r"^  steps: +(\d+)[;,]") == [
        str(init[key]["max_steps"]) for key in init if key == "loop"
    ]
    assert found_in(shown, r"^  sparsity: (\w+)$") == [
        {"static": "Static", "rigl": "RigL", "set": "SET"}[given.get("algorithm", "static")]
        for key, given in init.items()
        if key == "sparsity"
    ]


@pytest.mark.parametrize("path", FOR_CSX)
def test_a_file_for_other_hardware_needs_a_device_and_is_told_so(path, capfd):
    assert check(path) == 2
    shown, said = capfd.readouterr()
    assert shown == ""
    assert re.fullmatch(
        rf"{re.escape(str(path))}:\d+:\d+: trainer\.init\.backend\.backend_type: 'CSX' is hardware "
        rf"that this trainer does not support\. Use --device cpu, .*\n",
        said,
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", SOME)
def test_a_published_file_is_right_from_the_command_line(path):
    command = ["run.py", "--params", str(path), "--device", "cpu", "--check"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")  # its data are not here
    assert done.stdout.startswith(f"{path} is valid (nothing was built).\n")


# ---- trained


@dataclass(frozen=True)
class Run:
    """What a published file with a tiny model did in three steps."""

    trainer: dict[str, Any]
    code: int
    watch: Watch
    folder: Path

    @property
    def init(self) -> dict[str, Any]:
        return self.trainer["init"]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.watch.trainer.model.named_parameters()]


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory) -> Run:
    """The run of a file; the tests of one file share it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "params.yaml").write_text(to_yaml(shortened(TRAINERS[request.param])))
    watch = Watch()
    handle = register_global_callback(watch)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            code = main(["--params", "params.yaml", "--device", "cpu", "--model_dir", "run"])
        finally:
            handle.remove()
    return Run(TRAINERS[request.param], code, watch, folder / "run")


trained = pytest.mark.parametrize("ran", WITH_FIT, indirect=True)


@trained
def test_it_trains_to_its_end_with_finite_losses(ran):
    assert ran.code == 0
    assert ran.watch.trainer.global_step == NUM_STEPS
    losses = torch.stack(ran.watch.losses)
    assert losses.isfinite().all()
    assert len(losses) == NUM_STEPS * len(ran.watch.num_samples[0])


@trained
def test_its_batches_go_through_the_model_in_its_micro_batches(ran):
    fit = "fit", "train_dataloader", "ScopedTrainFlags"
    assert ran.watch.num_samples == [parts_of(ran.trainer, *fit)] * NUM_STEPS


@trained
def test_it_validates_one_batch_at_the_end_in_its_micro_batches(ran):
    section = shortened(ran.trainer)["trainer"]
    fit = "fit", "val_dataloader", "ScopedValidateFlags"
    assert ran.watch.trainer.model.sizes == parts_of(section, *fit)


@trained
def test_its_optimizer_is_the_one_it_names_with_its_arguments(ran):
    optimizer = ran.watch.trainer.optimizer
    name, given = only(ran.init["optimizer"])
    own = {key: given[key] for key in ("betas", "eps", "correct_bias", "momentum") if key in given}
    assert type(optimizer).__name__.lower() == name.lower()
    assert [{key: as_yaml(group[key]) for key in own} for group in optimizer.param_groups] == [
        own for _ in optimizer.param_groups
    ]


@trained
def test_every_parameter_learns_at_the_rate_of_its_schedule(ran):
    assert ran.watch.rates == [
        close_to(rates_at(step, ran.names, ran.init)) for step in range(NUM_STEPS)
    ]


@trained
def test_every_parameter_decays_as_its_schedule_says(ran):
    assert ran.watch.decays == [
        close_to(decays_at(step, ran.names, ran.init)) for step in range(NUM_STEPS)
    ]


@trained
def test_its_sparse_weights_are_zero_in_the_fraction_that_it_says(ran):
    given = ran.init.get("sparsity")
    params = dict(ran.watch.trainer.model.named_parameters())
    sparse = names_of_sparse(ran.init)
    assert bool(sparse) is (given is not None)
    assert all(name in params for name in sparse)
    assert [(params[name] == 0).sum().item() for name in sparse] == [
        round(given["sparsity"] * params[name].numel()) for name in sparse
    ]


@trained
def test_its_schedules_have_their_values_at_all_milestones(ran):
    built, given = ran.watch.trainer.schedulers, ran.init["schedulers"]
    steps = [[*telling_steps(one), ran.init["loop"]["max_steps"]] for one in given]
    found = [[one.value(at) for at in ats] for one, ats in zip(built, steps, strict=True)]
    expected = [[value_at(one, at) for at in ats] for one, ats in zip(given, steps, strict=True)]
    assert found == [close_to(values) for values in expected]


@trained
def test_it_leaves_the_checkpoints_that_it_says(ran):
    assert sorted(path.name for path in ran.folder.glob("checkpoint_*")) == checkpoints_of(ran.init)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (path,) = [path for path, given in TRAINERS.items() if "ckpt_path" in given.get("fit", {})]
    short = shortened(TRAINERS[path])
    short["trainer"]["fit"]["ckpt_path"] = TRAINERS[path]["fit"]["ckpt_path"]
    Path("params.yaml").write_text(to_yaml(short))
    assert main(["--params", "params.yaml", "--device", "cpu"]) == 2
    assert "finetuning_tutorial/from_hf/pytorch_model_to_cs-2.5.mdl" in capfd.readouterr().err
