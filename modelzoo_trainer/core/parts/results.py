"""The result of a run: its metrics, steps, checkpoints, and what stopped it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from modelzoo_trainer.trainer import Trainer

_MOST_METRICS: Final = 4  # in `repr`


class Best(NamedTuple):
    """The best value of a metric, and the `global_step` at which it was first reached."""

    value: float
    step: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of `fit`, `validate`, `validate_all` or `test`.

    Args:
        method: The trainer's method; "predict" only in `trainer.result`.
        metrics: The last value of each metric that is a number; for `validate` and `test` only
            their own, without the prefix of the dataloader.
        best: The best values of validation metrics with a direction: by name, such as `loss` and
            `accuracy`, or because a callback watches them with a `mode`. Only of this call, that
            is since `first_step`, not from before the run was resumed; `best_checkpoint` is of the
            whole run.
        first_step: The `global_step` at which the call began to train; 0 = a new run.
        steps: Optimizer steps of this call.
        global_step: The step at its end.
        epochs: Completed epochs, including those before a restart.
        stopped_by: What stopped it early, such as "SIGINT", "max_time", the reason of
            `EarlyStopping` or the error; None = it finished.
        checkpoints: Checkpoints that it wrote and that still exist, in order.
        seconds: The duration, with validations and checkpoints; so `steps / seconds` is less than
            the steps per second of training that the console and the report show.
        model_dir: The folder of the run.
        per_checkpoint: The metrics of each checkpoint of `validate_all`.
        last_checkpoint: The last of `checkpoints` that a run can resume from automatically, so
            none of callbacks such as `SaveBest`; None = there is none.
        best_checkpoint: The best checkpoint of the first `SaveBest`; None = none.
        weights_step: The step of the model's weights at its end, if `SaveBest(load_best=True)` has
            loaded other weights than at `global_step`; None = the same.
    """

    method: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Best] = field(default_factory=dict)
    first_step: int = 0
    steps: int = 0
    global_step: int = 0
    epochs: int = 0
    stopped_by: str | None = None
    checkpoints: tuple[Path, ...] = ()
    seconds: float = 0.0
    model_dir: Path = Path()
    per_checkpoint: Mapping[Path, Mapping[str, float]] = field(default_factory=dict)
    last_checkpoint: Path | None = None
    best_checkpoint: Path | None = None
    weights_step: int | None = None

    def __repr__(self) -> str:
        parts = [f"{self.method} to step {self.global_step}"]
        if self.method == "fit":
            parts[0] = f"fit, {self.steps} steps to step {self.global_step}"
        parts.append(f"{self.seconds:.1f} s")
        parts += [f"{name} {value:.5g}" for name, value in self._shown().items()]
        since = f" since step {self.first_step}" if self.first_step else ""
        parts += [
            f"best {name}{since} {value:.5g} at {step}" for name, (value, step) in self._bests()
        ]
        if self.weights_step is not None:
            parts.append(f"best weights of step {self.weights_step}")
        if self.checkpoints:
            parts.append(f"last checkpoint {self.last_checkpoint or self.checkpoints[-1]}")
        if self.stopped_by is not None:
            parts.append(f"stopped by {self.stopped_by}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _shown(self) -> Mapping[str, float]:
        """Return the main metrics, losses first; of a fit, the loss and validation metrics."""
        of_fit = self.method == "fit"
        names = [
            name for name in self.metrics if not of_fit or name == "loss" or "validate_" in name
        ]
        names.sort(key=lambda name: name.rpartition("/")[2] != "loss")
        return {name: self.metrics[name] for name in names[:_MOST_METRICS]}

    def _bests(self) -> list[tuple[str, Best]]:
        """Return the best values that differ from the last ones."""
        found = [(name, best) for name, best in self.best.items() if name in self.metrics]
        return [pair for pair in found if pair[1].value != self.metrics[pair[0]]][:_MOST_METRICS]


def count_parameters(params: Iterable[Tensor]) -> tuple[int, int]:
    """Return the numbers of elements and of trainable ones, not counting lazy parameters."""
    num = num_trained = 0
    for param in params:
        try:
            size = param.numel()  # of all processes, if sharded
        except ValueError:  # of a lazy module before its first batch
            continue
        num += size
        num_trained += size if param.requires_grad else 0
    return num, num_trained


def describe_trainer(trainer: Trainer) -> str:
    """Describe a trainer in one line, as far as it is set up."""
    known = vars(trainer)
    parts = []
    model = known.get("model")
    if model is not None:
        parts += [type(model).__name__, f"{count_parameters(model.parameters())[0]:,} parameters"]
    if "backend" in known:
        parts.append(f"on {known['backend'].device}")
    if "optimizer" in known:
        parts.append(type(known["optimizer"]).__name__)
    if "global_step" in known:
        parts.append(f"at step {known['global_step']}")
    if "model_dir" in known:
        parts.append(f"model_dir={str(known['model_dir'])!r}")
    return f"{type(trainer).__name__}({', '.join(parts)})"
