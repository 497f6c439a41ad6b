"""What `fit` and `validate` return."""

from modelzoo_trainer.core.parts.results import Best, RunResult


def test_a_fit_shows_its_loss_and_validations_not_the_norms_of_its_layers():
    metrics = {"grad_norm/layer_0": 0.5, "lr/0": 0.1, "model_norm": 3.0, "loss": 0.25}
    result = RunResult(
        method="fit",
        metrics={**metrics, "validate_0/accuracy": 0.75, "validate_0/loss": 0.5},
        best={"validate_0/loss": Best(0.375, 20), "validate_0/accuracy": Best(0.75, 30)},
        steps=30,
        global_step=30,
        stopped_by="SIGINT",
    )
    shown = repr(result)
    for fact in ("30 steps", "loss 0.25", "validate_0/loss 0.5", "validate_0/accuracy 0.75"):
        assert fact in shown
    assert "best validate_0/loss 0.375 at 20" in shown
    assert "best validate_0/accuracy" not in shown  # it is the last value
    assert "SIGINT" in shown
    assert "norm" not in shown
    assert "lr/0" not in shown


def test_a_validation_shows_all_that_it_has_measured():
    result = RunResult(method="validate", metrics={"accuracy": 0.75, "loss": 0.5}, global_step=7)
    assert repr(result).index("loss 0.5") < repr(result).index("accuracy 0.75")
    assert "step 7" in repr(result)
