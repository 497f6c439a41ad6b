"""What holds for all shipped callbacks."""

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
from modelzoo_trainer.optim.warmup_stable_decay import WarmupStableDecay

SIZE = "csx.performance.micro_batch_size"


def generating(net):
    class Generating(net):
        def generate(self, input_ids, max_new_tokens, **options):
            return input_ids.repeat(1, max_new_tokens)

    return Generating


MAKERS = {
    "CheckLoss": lambda: callbacks.CheckLoss(),
    "ComputeNorm": lambda: callbacks.ComputeNorm(),
    "ComputeNormGNS": lambda: callbacks.ComputeNormGNS(["Linear"]),
    "ConvertSyncBatchNorm": lambda: callbacks.ConvertSyncBatchNorm(),
    "CountParams": lambda: callbacks.CountParams(),
    "DebugArgsPath": lambda: callbacks.DebugArgsPath("args.pb"),
    "DumpActivations": lambda: callbacks.DumpActivations(buffer_steps=2),
    "DumpAvailableTensorNames": lambda: callbacks.DumpAvailableTensorNames(),
    "DurationProfiler": lambda: callbacks.DurationProfiler(),
    "EarlyStopping": lambda: callbacks.EarlyStopping("loss"),
    "EmailNotification": lambda: callbacks.EmailNotification(
        "a@example.org", "b@example.org", server_name="127.0.0.1", port=9
    ),
    "ExtraCheckpoint": lambda: callbacks.ExtraCheckpoint(steps=2),
    "FlopUtilization": lambda: callbacks.FlopUtilization(),
    "GenerateText": lambda: callbacks.GenerateText("a", 2),
    "GlobalFlags": lambda: callbacks.GlobalFlags(**{SIZE: 2}),
    "HFCacheDir": lambda: callbacks.HFCacheDir("cache"),
    "KeepNCheckpoints": lambda: callbacks.KeepNCheckpoints(1),
    "LimitBatches": lambda: callbacks.LimitBatches(8),
    "LimitEvalSteps": lambda: callbacks.LimitEvalSteps(1),
    "LoadCheckpointStates": lambda: callbacks.LoadCheckpointStates("model"),
    "LogInputSummaries": lambda: callbacks.LogInputSummaries(),
    "LogMetrics": lambda: callbacks.LogMetrics(),
    "LogOptimizerParamGroup": lambda: callbacks.LogOptimizerParamGroup(["lr", "momentum"]),
    "LogSparsity": lambda: callbacks.LogSparsity(),
    "Lora": lambda: callbacks.Lora({"r": 2}),
    "ModelEma": lambda: callbacks.ModelEma(0.9),
    "ModelEvalMetrics": lambda: callbacks.ModelEvalMetrics(),
    "ModelZooParamsMetadata": lambda: callbacks.ModelZooParamsMetadata({"a": 1}),
    "MoveModulesToDevice": lambda: callbacks.MoveModulesToDevice(),
    "NaNChecker": lambda: callbacks.NaNChecker(),
    "NormTensorListener": lambda: callbacks.NormTensorListener("size", ["layers.*.fwd", "*.grad"]),
    "OpProfiler": lambda: callbacks.OpProfiler(2, 3),
    "PrintProgress": lambda: callbacks.PrintProgress(),
    "ProgressBar": lambda: callbacks.ProgressBar(),
    "RateProfiler": lambda: callbacks.RateProfiler(),
    "RunHistory": lambda: callbacks.RunHistory(),
    "SamplesStreamedInfo": lambda: callbacks.SamplesStreamedInfo(),
    "SaveBest": lambda: callbacks.SaveBest("validate_0/loss"),
    "SaveCheckpointState": lambda: callbacks.SaveCheckpointState(1),
    "SavePerformanceData": lambda: callbacks.SavePerformanceData(),
    "ScopedBigCodeEvalHarnessFlags": lambda: callbacks.ScopedBigCodeEvalHarnessFlags(
        **{"csx.performance.micro_batch_size": 2}
    ),
    "ScopedEleutherEvalHarnessFlags": lambda: callbacks.ScopedEleutherEvalHarnessFlags(
        **{"csx.performance.micro_batch_size": 2}
    ),
    "ScopedTrainFlags": lambda: callbacks.ScopedTrainFlags(**{SIZE: 2}),
    "ScopedValidateFlags": lambda: callbacks.ScopedValidateFlags(**{SIZE: 2}),
    "SelectiveGrad": lambda: callbacks.SelectiveGrad({"param_filter": "head.*"}),
    "SkipSamples": lambda: callbacks.SkipSamples(8),
    "SlackNotification": lambda: callbacks.SlackNotification("general"),
    "SpikeDetection": lambda: callbacks.SpikeDetection(),
    "StepBasedEvaluation": lambda: callbacks.StepBasedEvaluation(1),
    "SummaryTensorListener": lambda: callbacks.SummaryTensorListener(
        "seen", ["layers.*.fwd", "*.grad"]
    ),
    "TerminateOnNaN": lambda: callbacks.TerminateOnNaN(),
    "WSDCheckpoint": lambda: callbacks.WSDCheckpoint(),
    "WeightCompression": lambda: callbacks.WeightCompression(
        {"format": "int8", "param_filter": "*"}
    ),
}

SETTINGS = {  # what a trainer needs for them
    "LogSparsity": {"sparsity": 0.5},
    "WSDCheckpoint": {
        "schedulers": lambda optimizer: WarmupStableDecay(optimizer, 0.1, 5, decay_ratio=0.4)
    },
}


def test_all_of_them_are_tested_here():
    classes = [name for name in callbacks.__all__ if isinstance(getattr(callbacks, name), type)]
    assert classes == list(MAKERS)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_it_runs_without_a_host_read_in_the_step(make, batches, net, name, device):
    settings = {"loop": TrainingLoop(max_steps=3, eval_frequency=2), **SETTINGS.get(name, {})}
    trainer = make(MAKERS[name](), device=device, model=generating(net), **settings)
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
    assert expected | {"ValidationCallback", "ValidationLoop"} <= vars(callbacks).keys()


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


# ---- what one saves is what it saves again when it has loaded it


LOGGERS = {name: getattr(loggers, name) for name in loggers.__all__ if name.endswith("Logger")}
STATEFUL = {
    "CSVLogger",
    "CheckLoss",
    "EarlyStopping",
    "ExtraCheckpoint",
    "FlopUtilization",
    "JsonlLogger",
    "KeepNCheckpoints",
    "LogMetrics",
    "MLflowLogger",
    "ModelEma",
    "RunHistory",
    "SamplesStreamedInfo",
    "SaveBest",
    "SaveCheckpointState",
    "SelectiveGrad",
    "SkipSamples",
    "SpikeDetection",
    "TerminateOnNaN",
    "WSDCheckpoint",
    "WandbLogger",
}


def equal(first, second):
    """Return whether two states are the same, of the same types, tensors bit by bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def state_of(callback):
    return callback.state_dict() if hasattr(callback, "state_dict") else {}


@pytest.mark.parametrize("name", [*MAKERS, *LOGGERS])
def test_what_it_saves_is_what_it_saves_again(make, batches, net, tmp_path, name):
    def trainer_with(callback):
        loop = TrainingLoop(max_steps=5, eval_frequency=2)
        settings = {"model": generating(net), "loop": loop, "checkpoint": Checkpoint(steps=2)}
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
    assert bool(saved) == (name in STATEFUL)
    assert equal(state_of(fresh), saved)
