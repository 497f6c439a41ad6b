"""The training loss of an epoch: the mean over its samples."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs, StateDict
from modelzoo_trainer.core.loss_accum import Mean, take_all
from modelzoo_trainer.devices import map_tensors
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

TRAIN_LOSS_EPOCH: Final = "train_loss_epoch"
_STATE: Final = "epoch_loss"


class EpochLoss(Callback):
    """Base class of callbacks that log `train_loss_epoch`; of several, the first one does.

    Not logged for an epoch in whose middle it was added to a run that resumed.

    State: `epoch_loss`, within an epoch alone: the mean so far.

    Cost: A step adds one number on the device; an epoch's end reduces two over the processes.
    """

    def __init__(self) -> None:
        self._mean = Mean(double=True)
        self._window: list[tuple[Tensor, Any]] = []  # batches since the last optimizer step
        self._is_first = False
        self._lacks_some = False  # of the samples of this epoch

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._is_first = trainer.get_callback(EpochLoss) is self
        self._mean = Mean(double=trainer.backend.caps.float64)

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        stack.callback(self._window.clear)  # of a step that a stop has cut off

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        if self._is_first and not self._mean.is_used:  # so that all steps have one graph
            self._mean.add(torch.zeros((), device=trainer.backend.device), 0)

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if not self._is_first:
            return
        loss = outputs["loss"].detach().reshape(())
        self._window.append((loss, _weight(trainer, outputs, batch)))
        if trainer.should_run_optimizer_step:
            for loss, weight in self._window:
                self._mean.add(loss, weight)
            self._window.clear()

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        lacks_some, self._lacks_some = self._lacks_some, False
        if self._is_first and self._mean.is_used:
            mean = take_all({TRAIN_LOSS_EPOCH: self._mean}, trainer.backend)
            if not lacks_some:
                trainer.logging.collect(trainer, mean, trainer.global_step)  # whatever log_steps is
                trainer.drain()  # before its weights are gone

    # ---- state: each process has a part of the sum

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        own = self._mean.state_dict()
        if not self._is_first or own is None:
            return
        shard, num_shards = trainer.backend.data_shard
        state: dict[str, Any] = {"means": [own]}
        if num_shards > 1:
            rows = torch.zeros(num_shards, 2, dtype=own["sum"].dtype, device=own["sum"].device)
            rows[shard, 0], rows[shard, 1] = own["sum"], own["weight"]
            rows = trainer.backend.reduce(rows)
            state["means"] = [{"sum": row[0], "weight": row[1]} for row in rows]
        if not trainer.should_run_optimizer_step:
            state["window"] = [list(pair) for pair in self._window]
        state_dict[_STATE] = trainer.backend.state_view(state)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if not self._is_first:
            return
        device = trainer.backend.device
        self._lacks_some = _STATE not in state_dict and trainer.data.batch_idx > 0
        state = state_dict.get(_STATE, {"means": [None]})
        state = map_tensors(state, lambda tensor: tensor.to(device, copy=True))
        self._window[:] = [(loss, weight) for loss, weight in state.get("window", ())]
        means = state["means"]
        shard, num_shards = trainer.backend.data_shard
        if len(means) != num_shards:  # now it is divided otherwise: the first one has it all
            total = {key: sum(mean[key] for mean in means) for key in ("sum", "weight")}
            nothing = {"sum": torch.zeros_like(total["sum"]), "weight": 0}
            means = [total, *[nothing] * (num_shards - 1)]
        self._mean.load_state_dict(means[shard], device)


def _weight(trainer: Trainer, outputs: Outputs, batch: Batch) -> Any:
    if trainer.grad_accum.is_active:
        return trainer.grad_accum.weight
    try:
        return trainer.weight_of(outputs, batch)
    except ConfigError:  # the size of such batches is not known: they count alike
        return 1
