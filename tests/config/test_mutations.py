"""Every key and value of a complete file, spoilt one at a time."""

from __future__ import annotations

import pytest

from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import Mapping, Scalar, Sequence
from modelzoo_trainer.errors import ConfigError

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


def keys_of(node):
    """Yield the places of all keys, and the keys."""
    if isinstance(node, Mapping):
        for key, entry in node.entries.items():
            yield entry.key_at.line, entry.key_at.column, key
            yield from keys_of(entry.node)
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from keys_of(item)


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


KEYS = list(keys_of(read_text(FILE, "params.yaml")))
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
def test_a_misspelt_key_is_refused_at_its_line(complaints, line, column, key):
    text = FILE.splitlines()[line - 1]
    spoilt = text[: column - 1] + f"{key}_" + text[column - 1 + len(key) :]
    assert line in lines_of(complaints(with_line(line, spoilt)))


@pytest.mark.parametrize(("line", "column"), SCALARS)
def test_a_value_of_the_wrong_type_is_refused_at_its_line(complaints, line, column):
    text = FILE.splitlines()[line - 1]
    end = min(i for i in range(column, len(text) + 1) if text[i : i + 1] in ("", ",", "]"))
    spoilt = text[: column - 1] + "{wrong: type}" + text[end:]
    assert lines_of(complaints(with_line(line, spoilt))) == [line]


@pytest.mark.parametrize(("line", "column", "key"), KEYS)
def test_a_repeated_key_is_refused_at_its_second_line(line, column, key):
    text = FILE.splitlines()[line - 1]
    before, after = text[: column - 1], text[column - 1 :]
    with pytest.raises(ConfigError) as caught:
        read_text(with_line(line, f"{before}{key}: 0", " " * (column - 1) + after), "params.yaml")
    assert str(caught.value) == (
        f"params.yaml:{line + 1}:{column}: key {key!r} is given twice; first in line {line}."
    )
