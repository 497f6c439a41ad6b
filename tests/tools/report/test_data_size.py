"""The amount of data of runs with different batch sizes."""

import pytest

from modelzoo_trainer.tools.report.data_size import with_samples_per_epoch
from modelzoo_trainer.tools.report.settings import compared


def run(batches, per_batch, **more):
    sizes = {"data.batches_per_epoch": str(batches), "data.samples_per_batch": str(per_batch)}
    return {**sizes, **more}


def differing(*runs):
    return {row.path: row.cells for row in compared(with_samples_per_epoch(runs)).differing}


def test_half_of_the_data_is_seen_beside_another_batch_size():
    size = "trainer.fit.train_dataloader.batch_size"
    found = differing(run(45, 32, **{size: "32"}), run(6, 128, **{size: "128"}))
    assert found == {
        size: ("32", "128 <small>(&times; 4)</small>"),
        "data.samples_per_epoch": ("\u2248 1440", "\u2248 768 <small>(&times; 0.533)</small>"),
    }


@pytest.mark.parametrize("batches", [11, 12])  # 1437 samples: the last batch dropped, or not
def test_the_same_data_in_other_batches_is_no_difference(batches):
    assert list(differing(run(45, 32), run(batches, 128))) == ["data.samples_per_batch"]


def test_an_exact_number_of_samples_is_kept():
    exact = {"data.samples_per_epoch": "1437"}
    found = compared(with_samples_per_epoch([run(45, 32, **exact), run(12, 128, **exact)]))
    assert [(row.path, row.cells) for row in found.same] == [("data.samples_per_epoch", ("1437",))]


def test_the_batch_size_of_several_processes_does_not_repeat_that_of_one():
    found = differing(run(45, 64, batch_size="32"), run(6, 128, batch_size="32"))
    assert set(found) == {"data.samples_per_batch", "data.samples_per_epoch"}


@pytest.mark.parametrize(
    "runs",
    [
        [run(45, 32), run(44, 32)],
        [run(45, 32), {"data.batches_per_epoch": "6"}],
        [run(45, 32), run("unknown", 128)],
        [run(45, 32), {}],
    ],
    ids=["same batch size", "unknown", "no number", "no settings"],
)
def test_nothing_is_replaced_without_two_known_batch_sizes(runs):
    assert with_samples_per_epoch(runs) == runs
