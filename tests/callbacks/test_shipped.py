"""Properties of all shipped callbacks."""

import pytest
import torch

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    CoreCallback,
    TrainingLoop,
    callbacks,
    checkpointing,
    loggers,
)
from tests.callback_makers import (
    CHOSEN,
    ELSEWHERE,
    MAKERS,
    SETTINGS,
    WITH_A_LANGUAGE_MODEL,
    GeneratingNet,
    shipped,
)


def test_what_is_chosen_for_some_is_for_shipped_callbacks():
    assert CHOSEN.keys() | SETTINGS.keys() | ELSEWHERE | WITH_A_LANGUAGE_MODEL <= shipped().keys()
    assert len(MAKERS) > 50


@pytest.mark.slow_cases("fake-*", every=4)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_it_runs_without_a_host_read_in_the_step(make, batches, name, device):
    settings = {"loop": TrainingLoop(max_steps=3, eval_frequency=2), **SETTINGS.get(name, {})}
    trainer = make(MAKERS[name](), device=device, model=GeneratingNet, **settings)
    trainer.fit(batches, batches[:2])
    assert trainer.global_step == 3
    assert trainer.backend.counters().get("host_reads", 0) == 0


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_the_defaults_run_together_with_all_loggers(make, batches, device):
    trainer = make(*callbacks.default_callbacks(), device=device, loggers=loggers.default_loggers())
    trainer.fit(batches, batches[:2])
    text = (trainer.model_dir / "metrics.jsonl").read_text()
    assert text.count('"loss"') == 4
    assert text.count('"model_wise_grad_norm"') == 4
    assert text.count('"validate_0/accuracy"') == 1


def test_the_weights_do_not_depend_on_the_callbacks(make, batches, tmp_path):
    plain = make(model_dir=tmp_path / "plain")
    watched = make(*callbacks.default_callbacks(), model_dir=tmp_path / "watched")
    plain.fit(batches)
    watched.fit(batches)
    for before, after in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(before, after)


def test_the_registry_holds_no_core_callback_and_no_base_class():
    classes = [getattr(callbacks, name) for name in callbacks.__all__]
    classes = [cls for cls in classes if isinstance(cls, type)]
    assert all(issubclass(cls, Callback) and cls is not Callback for cls in classes)
    assert not any(issubclass(cls, CoreCallback) for cls in classes)


def test_the_core_ones_that_users_expect_are_at_hand():
    expected = {"Callback", "Checkpoint", "Logging", "MixedPrecision", "TrainingLoop"}
    for name in expected | {"ValidationCallback", "ValidationLoop"}:
        assert isinstance(getattr(callbacks, name), type)


def test_the_registry_is_sorted():
    assert callbacks.__all__ == sorted(callbacks.__all__)


def test_the_defaults_are_new_each_time():
    first, second = callbacks.default_callbacks(), callbacks.default_callbacks()
    assert [type(item).__name__ for item in first] == [
        "CheckLoss",
        "LogOptimizerParamGroup",
        "ComputeNorm",
        "ModelEvalMetrics",
        "RateProfiler",
        "DurationProfiler",
        "SavePerformanceData",
        "ModelZooParamsMetadata",
    ]
    assert not {id(item) for item in first} & {id(item) for item in second}


# ---- a loaded state is saved unchanged


LOGGERS = {name: getattr(loggers, name) for name in loggers.__all__ if name.endswith("Logger")}


def equal(first, second):
    """Return whether two states are equal, with the same types and bit-identical tensors."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def state_of(callback):
    return callback.state_dict() if hasattr(callback, "state_dict") else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAKERS, *LOGGERS])
def test_what_it_saves_is_what_it_saves_again(make, batches, tmp_path, name):
    def trainer_with(callback):
        loop = TrainingLoop(max_steps=5, eval_frequency=2)
        settings = {"model": GeneratingNet, "loop": loop, "checkpoint": Checkpoint(steps=2)}
        settings |= SETTINGS.get(name, {})
        return make(callback, loggers=(), **settings)

    callback, fresh = ((MAKERS | LOGGERS)[name]() for _ in range(2))
    trainer = trainer_with(callback)
    trainer.fit(batches, batches[:2])
    trainer.close()
    saved = state_of(callback)
    checkpointing.save(tmp_path / "saved", {"state": saved}, step=5)
    trainer_with(fresh)
    if saved:
        fresh.load_state_dict(checkpointing.load(tmp_path / "saved")["state"])
    assert bool(saved) == hasattr(callback, "state_dict")
    assert equal(state_of(fresh), saved)
