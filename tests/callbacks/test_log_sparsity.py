import pytest

from modelzoo_trainer import TrainingLoop
from modelzoo_trainer.callbacks.log_metrics import LogSparsity
from modelzoo_trainer.optim.sparsity import GMP, RigL


def test_target_and_actual_are_logged_on_log_steps(make, batches, history):
    gmp = GMP({"type": "linear", "init": 0.25, "slope": 0.125}, param_filter="layers.0.weight")
    make(LogSparsity(), sparsity=gmp, log_steps=2, max_steps=4).fit(batches)
    # Steps 2 and 4 began at 1 and 3.
    assert history.of("sparsity/layers.0.weight/target") == [(2, 0.375), (4, 0.625)]
    assert history.of("sparsity/layers.0.weight/actual") == [(2, 0.375), (4, 0.625)]


def test_what_a_fraction_is_rounded_to_is_the_actual_one(make, batches, history):
    sparsity = RigL(0.3, update={"freq": 2}, param_filter="head.weight")
    make(LogSparsity(), sparsity=sparsity).fit(batches)
    assert history.of("sparsity/head.weight/target") == [(step, 0.3) for step in (1, 2, 3, 4)]
    assert history.of("sparsity/head.weight/actual") == [(step, 0.25) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_it_reads_nothing_in_the_step(make, batches, device):
    trainer = make(LogSparsity(), sparsity=0.5, device=device)
    trainer.fit(batches)
    assert trainer.backend.counters().get("host_reads", 0) == 0


def test_accumulated_steps_are_logged_once(make, batches, history):
    loop = TrainingLoop(max_steps=2, grad_accum_steps=2)
    make(LogSparsity(), sparsity=0.5, loop=loop).fit(batches)
    assert history.of("sparsity/head.weight/actual") == [(1, 0.5), (2, 0.5)]


def test_without_sparsity_it_says_so_and_logs_nothing(make, batches, history, caplog):
    make(LogSparsity()).fit(batches)
    assert "no parameter is sparse" in caplog.text
    assert not [name for _, metrics in history.lines for name in metrics if "sparsity" in name]
