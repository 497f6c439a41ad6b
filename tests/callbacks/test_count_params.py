import logging

import pytest
from torch import nn

from modelzoo_trainer import ConfigError
from modelzoo_trainer.callbacks import CountParams


def lines(counter):
    return [" ".join(line.split()) for line in counter.table.splitlines()]


def test_the_table_has_a_row_for_each_parameter_and_a_total(make):
    counter = CountParams()
    make(counter)
    table = lines(counter)
    assert table[2] == "layers.0.weight parameter float32 4x4 16 64 35.56 16"
    assert [row.split()[0] for row in table[2:8]] == [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "head.weight",
        "head.bias",
    ]
    assert table[-1] == "total 45 180 100.00 45"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.first.weight.requires_grad_(False)


def test_a_tied_weight_counts_once_and_buffers_and_frozen_ones_are_reported(make):
    counter = CountParams()
    make(counter, model=Tied, optimizer=None)
    table = lines(counter)
    assert table[2] == "first.weight parameter float32 4x4 16 64 64.00 0"
    assert table[-3] == "norm.num_batches_tracked buffer int64 () 1 8 4.00 0"
    assert table[-1] == "total 25 104 100.00 0"


def test_rows_whose_names_become_equal_are_added_up(make):
    counter = CountParams(search_and_replace=[(r"layers\.\d+", "layers.*")])
    make(counter)
    assert lines(counter)[2] == "layers.*.weight parameter float32 2 * 4x4 32 128 71.11 32"


def test_rows_are_sorted_by_a_column(make):
    counter = CountParams(order_by="elements", descending=True)
    make(counter)
    assert [row.split()[4] for row in lines(counter)[2:8]] == ["16", "16", "4", "4", "4", "1"]


def test_the_table_is_logged_once(make, batches, caplog):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    trainer = make(CountParams())
    trainer.fit(batches, batches[:1])
    assert caplog.text.count("Parameters and buffers of Net") == 1
    assert "head.bias" in (trainer.artifact_dir / "run.log").read_text()


def test_a_column_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"order_by: expected 'name', 'type', .*, got 'size'"):
        CountParams(order_by="size")


def test_what_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigError, match=r"search_and_replace: '\(' is not a valid regular"):
        CountParams(search_and_replace=[("(", "")])
