"""Small classes in the place of the shipped ones, so that a file is checked without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.names import Names, NameTable
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.errors import ConfigError


class Recorded:
    """Remembers what it was made from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class FakeTrainer(Recorded):
    """Remembers what it was asked to do."""

    checkpoint = SimpleNamespace(require_any=lambda trainer, method, ckpt_path: None)

    def fit(self, **call: Any) -> None:
        self.ran = ("fit", call)

    def validate(self, **call: Any) -> None:
        self.ran = ("validate", call)

    def validate_all(self, **call: Any) -> None:
        self.ran = ("validate_all", call)


class TinyNet(Recorded):
    def __init__(
        self,
        *,
        hidden_size: int,
        dropout: float = 0.0,
        activation: Literal["relu", "gelu"] = "relu",
    ) -> None:
        super().__init__(hidden_size=hidden_size, dropout=dropout, activation=activation)


class AdamW(Recorded):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        correct_bias: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, correct_bias=correct_bias)


class LinearLR(Recorded):
    def __init__(
        self,
        optimizer: Any = None,
        *,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
    ) -> None:
        super().__init__(optimizer, ends=(initial_learning_rate, end_learning_rate, total_iters))


class SequentialLR(Recorded):
    def __init__(self, optimizer: Any, schedulers: list[Any]) -> None:
        super().__init__(optimizer, schedulers=schedulers)


class MixedPrecision(Recorded):
    def __init__(
        self,
        enabled: bool = True,
        fp16_type: Literal["bfloat16", "float16"] = "bfloat16",
        loss_scaling_factor: float | Literal["dynamic"] | None = 1.0,
    ) -> None:
        super().__init__(enabled=enabled, fp16_type=fp16_type, scale=loss_scaling_factor)


class TrainingLoop(Recorded):
    def __init__(
        self,
        num_steps: int | None = None,
        max_steps: int | None = None,
        num_epochs: int | None = None,
        eval_frequency: int | float | None = 1.0,
    ) -> None:
        if num_steps is not None and num_epochs is not None:
            raise ConfigError("loop: num_steps and num_epochs are both given.")
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"loop.max_steps is {max_steps}; it must be > 0.")
        super().__init__(max_steps=max_steps, eval_frequency=eval_frequency)


class Checkpoint(Recorded):
    def __init__(self, steps: int | None = None, checkpoint_root: Path | None = None) -> None:
        super().__init__(steps=steps, checkpoint_root=checkpoint_root)


class Logging(Recorded):
    def __init__(self, log_steps: int, log_level: str = "INFO") -> None:
        super().__init__(log_steps=log_steps, log_level=log_level)


class CheckLoss(Recorded):
    def __init__(self) -> None:
        super().__init__()


class RateProfiler(Recorded):
    def __init__(self) -> None:
        super().__init__()


class EarlyStopping(Recorded):
    def __init__(
        self,
        monitor: str,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        keys: str | Iterable[str] = "lr",
    ) -> None:
        super().__init__(monitor=monitor, patience=patience, mode=mode, keys=keys)


class GlobalFlags(Recorded):
    def __init__(self, **flags: Any) -> None:
        super().__init__(**flags)


class ProgressLogger(Recorded):
    def __init__(self, summary_dir: Path | None = None) -> None:
        super().__init__(summary_dir=summary_dir)


class Digits:
    def __init__(self, *, batch_size: int, split: str = "train", shuffle: bool = False) -> None:
        self.batch_size = batch_size
        self.split = split

    def create_dataloader(self) -> list[str]:
        return [self.split] * self.batch_size


def try_backend(device, options):
    if (device or "cpu").lower() not in ("cpu", "gpu", "auto"):
        raise ConfigError(f"device: {device!r} is not a backend. Did you mean 'cpu'?")
    if "flg" in options:
        raise ConfigError("backend.flg: no such option of cpu. Did you mean 'flag'?")


def table(kind: str, *classes: type) -> NameTable:
    return NameTable.of(kind, {cls.__name__: cls for cls in classes})


@pytest.fixture
def names() -> Names:
    """Return small classes under the names that the tests' files use."""
    return Names(
        trainer=FakeTrainer,
        models=NameTable.of("model", {"tiny_net": TinyNet}),
        optimizers=table("optimizer", AdamW),
        schedulers=table("scheduler", LinearLR, SequentialLR),
        callbacks=table("callback", CheckLoss, EarlyStopping, GlobalFlags, RateProfiler),
        loggers=table("logger", ProgressLogger),
        processors=table("data processor", Digits),
        sections={
            "precision": MixedPrecision,
            "loop": TrainingLoop,
            "checkpoint": Checkpoint,
            "logging": Logging,
        },
        try_backend=try_backend,
        default_callbacks=lambda: [CheckLoss(), RateProfiler()],
        default_loggers=lambda: [ProgressLogger()],
    )


@pytest.fixture
def check(names: Names) -> Callable[..., list[TrainerPlan]]:
    """Return a function from a file's text, and a mode, to plans."""

    def run(text: str, mode: str = "train_and_eval") -> list[TrainerPlan]:
        return check_config(read_text(text, "params.yaml"), names, mode)

    return run


@pytest.fixture
def complaints(check: Callable[..., list[TrainerPlan]]) -> Callable[..., list[str]]:
    """Return a function from a file's text to the lines of its `ConfigError`."""

    def run(text: str, mode: str = "train_and_eval") -> list[str]:
        with pytest.raises(ConfigError) as caught:
            check(text, mode)
        return str(caught.value).splitlines()

    return run
