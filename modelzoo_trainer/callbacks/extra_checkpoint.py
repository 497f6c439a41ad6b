"""Additional checkpoints with their own interval, parts, format and folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked_dataclass
from modelzoo_trainer.callback import Callback, Loader, StateDict
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.callbacks.parts.side_checkpoints import (
    SideCheckpoints,
    SideFolder,
    StepName,
    check_is_directory,
    part_names,
    parts_of,
)
from modelzoo_trainer.checkpointing.manifest import SUFFIX
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_STATES: Final = "ExtraCheckpoint.checkpoint_states"
_NAME: Final = "ExtraCheckpoint.checkpoint_name"


@checked_dataclass
class ExtraCheckpoint(Callback):
    """Write additional checkpoints or weights files, on their own schedule.

    Can be used several times. A run never resumes from these automatically; `fit(ckpt_path=...)`
    accepts them like any other. If one cannot be written, an error is logged; the run continues.

    Args:
        steps: Write on every n-th step, > 0; None = not by steps.
        epochs: Write at the end of every n-th epoch, > 0; None = not by epochs.
        at_end: Whether to write at the end of a fit, unless it was interrupted.
        checkpoint_states: Names of top-level parts such as `model` and `optimizer`: a list or a
            comma-separated string; "all" = everything.
        file_format: "checkpoint", the format of the run's checkpoints, or "safetensors", a single
            file with the weights, for other programs.
        folder: Folder of the files; a path within `model_dir`.
        checkpoint_name: Name pattern; contains the field `{step}`, the number of optimizer steps,
            once.
        keep: Number of newest checkpoints to keep, > 0; None = all.
        averaged: Whether to write the averaged weights of `ModelEma` instead of the model's.

    State: The names of the checkpoints that it wrote and kept.

    Cost: Training waits for the write. With sharded weights, a `.safetensors` file is written
        twice.

    Raises:
        ConfigError: If an argument is invalid, nothing would ever be written, or another
            ExtraCheckpoint writes under the same names.
    """

    state_is_of_run = True

    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    at_end: bool = False
    checkpoint_states: str | list[str] = "model"
    file_format: Literal["checkpoint", "safetensors"] = "checkpoint"
    folder: SideFolder = "extra"
    checkpoint_name: StepName = "extra_{step}"
    keep: PositiveInt | None = None
    averaged: bool = False

    def __post_init__(self) -> None:
        if self.steps is self.epochs is None and not self.at_end:
            raise ConfigError(
                "ExtraCheckpoint would never save a checkpoint. Set steps, epochs or at_end."
            )
        self.states = part_names(_STATES, self.checkpoint_states)
        is_file = self.file_format == "safetensors"
        if self.states != ("model",) and (is_file or self.averaged):
            what = "file_format: safetensors" if is_file else "averaged: true"
            raise ConfigError(
                f"{_STATES}={self.checkpoint_states!r} cannot be combined with {what}, which saves "
                f"only weights. Set checkpoint_states to 'model'."
            )
        if not is_file:
            check_is_directory(_NAME, self.checkpoint_name)
        self._template = self.checkpoint_name + (SUFFIX if is_file else "")
        self._side = SideCheckpoints(
            "ExtraCheckpoint", self.folder, self.states, averaged=self.averaged
        )
        self._kept: list[str] = []
        self._last: int | None = None
        self._is_resumed = False

    # ---- setup

    @override
    def post_setup(self, trainer: Trainer) -> None:
        if self._template.endswith(SUFFIX):
            what = "ExtraCheckpoint with file_format: safetensors makes files of weights"
            trainer.object_store.refuse_if_split(trainer, what)
        self._side.check_is_apart(_NAME, trainer, self._template)
        for other in trainer.get_callbacks(ExtraCheckpoint):
            if other is not self and other._place(trainer) == self._place(trainer):
                raise ConfigError(
                    f"Two ExtraCheckpoint callbacks use the name {self._template!r} in "
                    f"{str(self._side.root(trainer))!r}. Give one of them another folder or "
                    f"checkpoint_name."
                )
        if self.averaged and trainer.get_callback(ModelEma) is None:
            raise ConfigError("ExtraCheckpoint.averaged requires the callback ModelEma. Add it.")

    def _place(self, trainer: Trainer) -> Path:
        return self._side.root(trainer).resolve() / self._template

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._side.prepare(trainer)

    @override
    def postprocess_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "all" not in self.states:
            parts_of(_STATES, state_dict, self.states)

    # ---- when

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self._is_due(trainer):
            self._write(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        if self.steps is not None and trainer.global_step % self.steps == 0:
            return True
        data = trainer.data
        return self.epochs is not None and data.is_last and (data.epoch + 1) % self.epochs == 0

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        if self.at_end and trainer.interrupted is None and self._last != trainer.global_step:
            self._write(trainer)

    # ---- what

    def _write(self, trainer: Trainer) -> None:
        wanted = self._template.format(step=trainer.global_step)
        name = self._side.write(trainer, wanted, replaces=self._is_resumed)
        if name is None:
            return
        self._last = trainer.global_step
        self._kept = [*(known for known in self._kept if known != name), name]
        if self.keep is not None:
            old, self._kept = self._kept[: -self.keep], self._kept[-self.keep :]
            self._side.delete(trainer, old)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the kept checkpoints and the step of the last one."""
        return {"kept": list(self._kept), "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; checkpoints that are written again replace the existing ones."""
        self._kept = [Path(name).name for name in state["kept"]]
        self._last = state["last"]
        self._is_resumed = True
