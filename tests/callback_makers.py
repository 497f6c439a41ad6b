"""Every shipped callback as runs of a small model can have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback, callbacks
from modelzoo_trainer.optim.warmup_stable_decay import WarmupStableDecay


class Net(nn.Module):
    """Two layers and a head; `accuracy` is the share of positive outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        hidden, target = batch
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        scores = self.head(hidden)
        loss = ((scores - target) ** 2).mean()
        return {"loss": loss, "scores": scores, "accuracy": (target > 0).float().mean()}


class GeneratingNet(Net):
    """As `Net`; what it generates is what it was given."""

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        return input_ids.repeat(1, max_new_tokens)


SIZE: Final = "csx.performance.micro_batch_size"


MAKERS: Final[dict[str, Callable[[], Callback]]] = {
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
    "LRFinder": lambda: callbacks.LRFinder(num_steps=10),
    "LimitBatches": lambda: callbacks.LimitBatches(8),
    "LimitEvalSteps": lambda: callbacks.LimitEvalSteps(1),
    "LoadCheckpointStates": lambda: callbacks.LoadCheckpointStates("model"),
    "LogExpertLoad": lambda: callbacks.LogExpertLoad(),
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
    "RayTrainReport": lambda: callbacks.RayTrainReport(),
    "Report": lambda: callbacks.Report(),
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

ELSEWHERE: Final = {"EleutherEvalHarness"}
"""Callbacks whose libraries not all tests have: tests/zoo/hugging_face."""

WITH_A_LANGUAGE_MODEL: Final = {"HuggingFaceCheckpoint"}
"""Callbacks that refuse any other model: tests/callbacks, by their names."""

SETTINGS: Final[dict[str, dict[str, Any]]] = {  # what a trainer needs for them
    "LogSparsity": {"sparsity": 0.5},
    "WSDCheckpoint": {
        "schedulers": lambda optimizer: WarmupStableDecay(optimizer, 0.1, 5, decay_ratio=0.4)
    },
}
