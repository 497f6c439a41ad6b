from pathlib import Path

import pytest

from modelzoo_trainer.tools.report.metric_names import (
    chart_of,
    section_of,
    short_names,
    unit_of,
)


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("loss", "loss"),
        ("train_loss_epoch", "loss"),
        ("validate_0/loss", "loss"),
        ("eval/perplexity", "loss"),
        ("validate_0/accuracy", "validation"),
        ("val_1/top_5", "validation"),
        ("lr/0", "lr"),
        ("lr-Adam", "lr"),
        ("train/learning_rate", "lr"),
        ("model_wise_grad_norm", "norm"),
        ("gns/layer_1", "norm"),
        ("avg_samples_per_sec", "throughput"),
        ("flops_utilization", "throughput"),
        ("memory/host_peak_gib", "memory"),
        ("loss_scale", "other"),
        ("color", "other"),
    ],
)
def test_a_metric_has_its_section(name, section):
    assert section_of(name) == section


def test_losses_of_training_and_validation_share_a_chart():
    assert chart_of("loss") == ("loss", "train")
    assert chart_of("validate_0/loss") == ("loss", "validate_0")
    assert chart_of("lr/0") == ("lr/0", "")


def test_rates_have_units():
    assert unit_of("local_samples_per_sec") == "samples/s"
    assert unit_of("memory/device_peak_gib") == "GiB"
    assert unit_of("loss") == ""


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/runs/a"], ["a"]),
        (["/runs/a", "/runs/b"], ["a", "b"]),
        (["/x/a/run", "/x/b/run"], ["a", "b"]),
        (["/x/a/run", "/y/a/run"], ["x", "y"]),
        (["/x/a/run", "/x/a/other"], ["run", "other"]),
    ],
)
def test_names_are_the_shortest_that_differ(paths, names):
    assert short_names([Path(path) for path in paths]) == names


def test_a_path_that_is_the_end_of_another_has_its_own_name():
    assert len(set(short_names([Path("/a"), Path("/b/a")]))) == 2
