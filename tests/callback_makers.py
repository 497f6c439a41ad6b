"""Every shipped callback as runs of a small model can have it.

One that requires arguments is made with those in `compat/every_callback.yaml`, unless others are
chosen here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback, callbacks
from modelzoo_trainer.config.loader import read_file
from modelzoo_trainer.config.positions import to_plain
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


ELSEWHERE: Final = {"EleutherEvalHarness"}
"""Callbacks whose libraries not all tests have: tests/zoo/hugging_face."""

WITH_A_LANGUAGE_MODEL: Final = {"HuggingFaceCheckpoint"}
"""Callbacks that refuse any other model: tests/callbacks, by their names."""

EVERY: Final = Path(__file__).parent / "compat" / "every_callback.yaml"
"""A configuration with all callbacks that require arguments, and others."""


def shipped() -> dict[str, type[Callback]]:
    """Return the shipped callbacks by name."""
    found = {name: getattr(callbacks, name) for name in callbacks.__all__}
    return {name: value for name, value in found.items() if isinstance(value, type)}


def requires_arguments(cls: type[Callback]) -> bool:
    """Return whether a callback cannot be made without arguments."""
    parameters = inspect.signature(cls).parameters.values()
    named = [one for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return any(one.default is one.empty for one in named)


def listed() -> dict[str, dict[str, Any]]:
    """Return the arguments of each callback in the configuration."""
    trainers = to_plain(read_file(EVERY))["trainer"]
    inits = [one["trainer"]["init"] for one in trainers]
    return {
        name: found for init in inits for one in init["callbacks"] for name, found in one.items()
    }


def _maker(name: str, cls: type[Callback]) -> Callable[[], Callback]:
    if name in CHOSEN:
        return CHOSEN[name]
    return partial(cls, **listed()[name]) if requires_arguments(cls) else cls


CHOSEN: Final[dict[str, Callable[[], Callback]]] = {
    "ComputeNormGNS": lambda: callbacks.ComputeNormGNS(["Linear"]),
    "DebugArgsPath": lambda: callbacks.DebugArgsPath("args.pb"),
    "DumpActivations": lambda: callbacks.DumpActivations(buffer_steps=2),
    "EarlyStopping": lambda: callbacks.EarlyStopping("loss"),
    "EmailNotification": lambda: callbacks.EmailNotification(
        "a@example.org", "b@example.org", server_name="127.0.0.1", port=9
    ),
    "ExtraCheckpoint": lambda: callbacks.ExtraCheckpoint(steps=2),
    "GenerateText": lambda: callbacks.GenerateText("a", 2),
    "GlobalFlags": lambda: callbacks.GlobalFlags(**{SIZE: 2}),
    "HFCacheDir": lambda: callbacks.HFCacheDir("cache"),
    "KeepNCheckpoints": lambda: callbacks.KeepNCheckpoints(1),
    "LRFinder": lambda: callbacks.LRFinder(num_steps=10),
    "LimitBatches": lambda: callbacks.LimitBatches(8),
    "LimitEvalSteps": lambda: callbacks.LimitEvalSteps(1),
    "LoadCheckpointStates": lambda: callbacks.LoadCheckpointStates("model"),
    "LogOptimizerParamGroup": lambda: callbacks.LogOptimizerParamGroup(["lr", "momentum"]),
    "Lora": lambda: callbacks.Lora({"r": 2}),
    "ModelEma": lambda: callbacks.ModelEma(0.9),
    "ModelZooParamsMetadata": lambda: callbacks.ModelZooParamsMetadata({"a": 1}),
    "NormTensorListener": lambda: callbacks.NormTensorListener("size", ["layers.*.fwd", "*.grad"]),
    "OpProfiler": lambda: callbacks.OpProfiler(2, 3),
    "SaveBest": lambda: callbacks.SaveBest("validate_0/loss"),
    "SaveCheckpointState": lambda: callbacks.SaveCheckpointState(1),
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
    "StepBasedEvaluation": lambda: callbacks.StepBasedEvaluation(1),
    "SummaryTensorListener": lambda: callbacks.SummaryTensorListener(
        "seen", ["layers.*.fwd", "*.grad"]
    ),
    "WeightCompression": lambda: callbacks.WeightCompression(
        {"format": "int8", "param_filter": "*"}
    ),
}

SETTINGS: Final[dict[str, dict[str, Any]]] = {  # what a trainer needs for them
    "LogSparsity": {"sparsity": 0.5},
    "WSDCheckpoint": {
        "schedulers": lambda optimizer: WarmupStableDecay(optimizer, 0.1, 5, decay_ratio=0.4)
    },
}

MAKERS: Final[dict[str, Callable[[], Callback]]] = {
    name: _maker(name, cls)
    for name, cls in shipped().items()
    if name not in ELSEWHERE | WITH_A_LANGUAGE_MODEL
}
