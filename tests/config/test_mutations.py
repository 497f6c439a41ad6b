"""Every key and value of a complete file and of the shipped ones, spoilt one at a time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import Mapping, Scalar, Sequence
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from tests.config.mutants import KINDS, MISSPELT, keys_of, misspellings, mutants_of
from tests.config.shapes import Format
from tests.config.verdicts import Verdicts

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))

FILE = """\
trainer:
  init:
    device: CPU
    model_dir: ./runs/x
    model:
      name: tiny_net
      hidden_size: 4
      dropout: 0.1
      activation: gelu
    optimizer:
      AdamW:
        lr: 1e-3
        betas: [0.9, 0.95]
        correct_bias: false
    schedulers:
      - SequentialLR:
          schedulers:
            - LinearLR:
                initial_learning_rate: 0
                end_learning_rate: 1e-3
                total_iters: 5
      - LinearLR:
          initial_learning_rate: 1.0
          end_learning_rate: 0.0
          total_iters: 1
    precision:
      enabled: true
      fp16_type: bfloat16
      loss_scaling_factor: dynamic
    loop:
      max_steps: 10
      eval_frequency: 5
    checkpoint:
      steps: 5
      checkpoint_root: ./elsewhere
    logging:
      log_steps: 1
      log_level: DEBUG
    callbacks:
      - RateProfiler: null
      - EarlyStopping:
          monitor: loss
          patience: 2
          mode: max
          keys:
            - lr
            - weight_decay
    loggers:
      - ProgressLogger:
          summary_dir: ./logs
    seed: 1
  fit:
    train_dataloader:
      data_processor: Digits
      batch_size: 2
      shuffle: true
    val_dataloader:
      data_processor: Digits
      batch_size: 3
    ckpt_path: ./runs/y
  validate:
    val_dataloader:
      data_processor: Digits
      batch_size: 4
    ckpt_path: null
  validate_all:
    val_dataloaders:
      - data_processor: Digits
        batch_size: 5
    ckpt_paths:
      - a
      - b
"""


def keys_in(node):
    """Yield the places of all keys, and the keys."""
    if isinstance(node, Mapping):
        for key, entry in node.entries.items():
            yield entry.key_at.line, entry.key_at.column, key
            yield from keys_in(entry.node)
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from keys_in(item)


def scalars_of(node):
    """Yield the places of all single values."""
    if isinstance(node, Scalar):
        yield node.at.line, node.at.column
    elif isinstance(node, Mapping):
        for entry in node.entries.values():
            yield from scalars_of(entry.node)
    else:
        for item in node.items:
            yield from scalars_of(item)


KEYS = list(keys_in(read_text(FILE, "params.yaml")))
SCALARS = list(scalars_of(read_text(FILE, "params.yaml")))


def with_line(number, *lines):
    """Return the file with one line replaced."""
    text = FILE.splitlines()
    text[number - 1 : number] = lines
    return "\n".join(text) + "\n"


def lines_of(found):
    return [int(line.split(":")[1]) for line in found]


def test_the_file_itself_is_right(check):
    assert len(check(FILE)) == 1
    assert (len(KEYS), len(SCALARS)) == (68, 46)


@pytest.mark.parametrize(("line", "column", "key"), KEYS)
@pytest.mark.slow_cases(every=4)
def test_a_misspelt_key_is_refused_at_its_line(complaints, line, column, key):
    text = FILE.splitlines()[line - 1]
    spoilt = text[: column - 1] + f"{key}_" + text[column - 1 + len(key) :]
    assert line in lines_of(complaints(with_line(line, spoilt)))


@pytest.mark.parametrize(("line", "column"), SCALARS)
@pytest.mark.slow_cases(every=4)
def test_a_value_of_the_wrong_type_is_refused_at_its_line(complaints, line, column):
    text = FILE.splitlines()[line - 1]
    end = min(i for i in range(column, len(text) + 1) if text[i : i + 1] in ("", ",", "]"))
    spoilt = text[: column - 1] + "{wrong: type}" + text[end:]
    assert lines_of(complaints(with_line(line, spoilt))) == [line]


@pytest.mark.parametrize(("line", "column", "key"), KEYS)
@pytest.mark.slow_cases(every=4)
def test_a_repeated_key_is_refused_at_its_second_line(line, column, key):
    text = FILE.splitlines()[line - 1]
    before, after = text[: column - 1], text[column - 1 :]
    with pytest.raises(ConfigError) as caught:
        read_text(with_line(line, f"{before}{key}: 0", " " * (column - 1) + after), "params.yaml")
    assert str(caught.value) == (
        f"params.yaml:{line + 1}:{column}: duplicate key {key!r}; first in line {line}."
    )


@pytest.fixture(scope="module")
def shipped():
    return shipped_names()


@pytest.fixture(scope="module")
def form(shipped):
    return Format(shipped)


def test_a_key_is_misspelt_as_fingers_do_it():
    assert misspellings("lr") == {
        "letter too many": "llr",
        "letter appended": "lrs",
        "letter dropped": "r",
        "letters swapped": "rl",
    }
    assert misspellings("max_steps") == misspellings("max_steps")
    assert misspellings("max_steps")["dash"] == "max-steps"


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_mistake_in_a_shipped_file_is_found_where_it_is(path, shipped, form, tmp_path):
    text = path.read_text(encoding="utf-8")
    verdicts = Verdicts(tmp_path, shipped)
    verdicts.judge(path.name, text, mutants_of(text, form))
    assert verdicts.missed == []
    assert verdicts.crashes == []
    assert sum(verdicts.counts[kind, "judged"] for kind in KINDS) > 2 * len(keys_of(text, form))
    assert verdicts.share("suggested") >= 0.95
    assert verdicts.open_places == {}


@pytest.mark.slow
def test_every_way_to_misspell_a_key_of_a_shipped_file_is_found(shipped, form, tmp_path):
    verdicts = Verdicts(tmp_path, shipped)
    for path in SHIPPED:
        text = path.read_text(encoding="utf-8")
        mutants = mutants_of(text, form, all_ways=True)
        verdicts.judge(path.name, text, (one for one in mutants if one.kind == MISSPELT))
    assert verdicts.missed == []
    assert verdicts.crashes == []
    assert verdicts.share("suggested") >= 0.95


def run(path, *options):
    """Return what the command did in a folder of its own, and the seconds of CPU time it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "--params", path.name, *options],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done, seconds


@pytest.mark.slow
def test_the_command_refuses_a_mistake_and_writes_nothing(form, tmp_path, capsys):
    text = SHIPPED[0].read_text(encoding="utf-8")
    judged = [one for one in mutants_of(text, form) if not one.is_open]
    times = []
    for kind in KINDS:
        mutants = [one for one in judged if one.kind == kind]
        for mutant, options in ((mutants[0], ()), (mutants[-1], ("--check",))):
            path = tmp_path / "params.yaml"
            path.write_text(mutant.text, encoding="utf-8")
            done, seconds = run(path, *options)
            what = f"{kind} {mutant.path} {options}"
            assert done.returncode == 2, what
            assert f"params.yaml:{mutant.line}:" in done.stderr, what
            assert mutant.word in done.stderr, what
            assert "Traceback" not in done.stderr, what
            assert done.stdout == "", what
            assert [one.name for one in tmp_path.iterdir()] == ["params.yaml"], what
            times.append(seconds)
    assert len(times) == 12
    with capsys.disabled():
        sys.stdout.write(f"\n12 refusals: {min(times):.2f} to {max(times):.2f} s of CPU time\n")
