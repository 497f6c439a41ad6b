"""Detection of bad optimizer steps, on the device; findings are read later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Outputs
from modelzoo_trainer.core.parts.step_check import StepCheck
from modelzoo_trainer.core.parts.structure import ModelStructure

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

# Of a normal distribution, the standard deviation over the median absolute deviation.
_TO_SIGMA: Final = 1.4826


class RecentLosses:
    """The losses of the last good steps, on the device; nothing is read on the host.

    Median and median absolute deviation are robust to outliers (Leys et al. 2013, Detecting
    outliers, J. Exp. Soc. Psychol. 49(4), 764-766).

    `size`: number of losses, > 0.

    State: `losses`, oldest first; NaN = none yet.
    """

    def __init__(
        self, size: int, threshold: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._threshold = threshold
        self._middle = (size - 1) // 2
        self._losses = torch.full((size,), torch.nan, device=device, dtype=dtype)

    def limit(self) -> Tensor:
        """Return the largest loss that is not a spike.

        Returns:
            (); infinite until the window is full, and while most of its losses are equal.
        """
        losses = self._losses
        median = self._median(losses)
        sigma = self._median((losses - median).abs()) * _TO_SIGMA
        limit = median + self._threshold * sigma
        # The oldest is NaN until the window is full.
        is_known = (losses[0] == losses[0]) & (sigma > 0)
        return torch.where(is_known, limit, torch.inf)

    def _median(self, values: Tensor) -> Tensor:
        return values.sort().values[self._middle]

    def add(self, loss: Tensor, bad: Tensor) -> None:
        """Add a loss, unless its step is bad.

        `loss`: (), of the window's dtype. `bad`: (), bool.
        """
        moved = torch.cat((self._losses[1:], loss.reshape(1)))
        self._losses = torch.where(bad, self._losses, moved)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses."""
        return {"losses": self._losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the losses; from a window of another size, the newest ones."""
        found = state["losses"].to(self._losses)
        size = len(self._losses)
        filler = torch.full_like(self._losses, torch.nan)
        self._losses = torch.cat((filler, found))[-size:]


Batches = list[tuple[int, int]]
_Place = tuple[dict[str, Tensor | None], str]
"""The buffers of a module, and the name of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinding:
    """Findings about a step, on the host."""

    step: int
    is_bad: bool  # on any process
    batches: Batches  # epoch and index of each of its batches
    loss: float
    norm: float | None = None  # gradient norm; None = not checked
    # largest loss that is not a spike; None = spikes are not checked
    limit: float | None = None

    @property
    def complaint(self) -> str:
        """What is bad and where, as a sentence without its full stop."""
        where = f"at global_step {self.step} ({named(self.batches)})"
        if not math.isfinite(self.loss):
            return f"loss is {self.loss} {where}"
        if self.norm is not None and not math.isfinite(self.norm):
            return f"the gradient norm is {self.norm} {where}; the loss is {self.loss:.6g}"
        if self.limit is not None and self.loss > self.limit:
            return f"loss is {self.loss:.6g} {where}, a spike (limit {self.limit:.6g})"
        return f"another process found a bad loss or gradient {where}"


def named(batches: Batches) -> str:
    """Format batches, such as "epoch 1, batches 4-6", with epochs counted from 1."""
    parts = []
    for epoch, places in groupby(batches, key=itemgetter(0)):
        idx = [place[1] for place in places]
        of_epoch = f"epoch {epoch + 1}"
        if len(idx) == 1:
            parts.append(f"{of_epoch}, batch {idx[0]}")
        elif idx == list(range(idx[0], idx[0] + len(idx))):
            parts.append(f"{of_epoch}, batches {idx[0]}-{idx[-1]}")
        else:
            parts.append(f"{of_epoch}, batches {', '.join(map(str, idx))}")
    return "; ".join(parts)


class StepLosses(Callback):
    """Collect the loss of a step: the mean over its batches and all processes.

    Cost: No host read; with several processes, an all-reduce of two numbers per step.
    """

    needs_trainer = True
    needs_one_optimizer = True

    def __init__(self) -> None:
        self.drop_batches()

    def drop_batches(self) -> None:
        """Drop the batches since the last step."""
        self._batches: Batches = []
        self._total: Any = 0.0
        self._weight: Any = 0

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        data = trainer.data
        place = (data.epoch, data.batch_idx - data.ends_batch)
        if place not in self._batches:  # micro-batches share the index of their batch
            self._batches.append(place)

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        loss = outputs["loss"].detach().reshape(()).to(wide_type(trainer))
        accumulation = trainer.grad_accum
        if not accumulation.is_active:
            self._total, self._weight = loss, 1
            return
        weight = accumulation.weight
        self._total = self._total + loss * weight
        self._weight = self._weight + weight

    def mean_loss(self, trainer: Trainer) -> Tensor:
        """Return the loss of the step, equal on all processes. Collective."""
        backend = trainer.backend
        total: Tensor = self._total
        weight = self._weight
        if backend.comm.world_size > 1:
            counted = weight if isinstance(weight, Tensor) else torch.full_like(total, weight)
            total, weight = backend.comm.reduce(torch.stack((total, counted.to(total)))).unbind()
        if isinstance(weight, Tensor):
            return total / weight.clamp_min(1)
        return total / weight if weight > 1 else total

    def open_batches(self) -> dict[str, Any]:
        """Return the state of the batches since the last step, for a checkpoint."""
        return {
            "batches": [list(place) for place in self._batches],
            "total": self._total,
            "weight": self._weight,
        }

    def load_open_batches(self, part: dict[str, Any], device: torch.device) -> None:
        """Restore what `open_batches` returned."""
        self._batches = [(epoch, batch_idx) for epoch, batch_idx in part["batches"]]
        self._total, self._weight = placed(part["total"], device), placed(part["weight"], device)


def placed(value: Any, device: torch.device) -> Any:
    """Return a value of a checkpoint, on the device if it is a tensor."""
    return value.to(device) if isinstance(value, Tensor) else value


def wide_type(trainer: Trainer) -> torch.dtype:
    """Return the dtype in which losses are accumulated."""
    return torch.float64 if trainer.backend.caps.float64 else torch.float32


Report = Callable[["Trainer", StepFinding], None]


class StepGuard(StepLosses):
    """Judge each step by the mean loss of its batches and the norm of its gradients.

    A step is bad if one of them is not finite, or the loss is a spike. The verdict stays on the
    device; findings are read later. A bad step can be skipped: parameters, buffers and the
    optimizer state are then bit by bit what they were before its first batch. A buffer whose shape
    has changed is not restored.

    `report`: called with the finding of each step, on the host. `window`: used to detect spikes;
    None = no spikes. `masks`: skip bad steps, and log their number: `skipped_steps`. `gradients`:
    check gradients, except with a loss scaler, which does so itself.

    State: The losses of the window, the number of skipped steps, and, within a step of several
        batches, their partial results.

    Cost: No host read. If it masks, a copy of the model's buffers per step; else see
        `Backend.optimizer_step`, `Backend.grad_norm` and `RecentLosses`.
    """

    def __init__(
        self,
        trainer: Trainer,
        report: Report,
        window: RecentLosses | None,
        *,
        masks: bool,
        gradients: bool,
    ) -> None:
        self._report: Final = report
        self._window: Final = window
        self._masks: Final = masks
        self._gradients: Final = gradients
        self._device = trainer.backend.device
        self._model = trainer.model
        self._structure: ModelStructure | None = None
        self._places: list[_Place] = []
        self._num_skipped = torch.zeros((), dtype=torch.int64, device=self._device)
        self.check: StepCheck | None = None
        """The check of the current step; None = between optimizer steps."""
        self._loss: Tensor | None = None
        self._limit: Tensor | None = None
        super().__init__()

    @override
    def drop_batches(self) -> None:
        super().drop_batches()
        self._copies: list[tuple[_Place, Tensor | None]] = []

    # ---- batches

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if self._masks and not self._batches:
            self._copies = [
                (place, None if own is None else own.clone()) for place, own in self._buffers()
            ]
        super().on_train_batch_start(trainer, model, batch, batch_idx)

    # ---- optimizer step

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        self._loss = self.mean_loss(trainer)
        bad = self._loss.isfinite().logical_not()
        if self._window is not None:
            self._limit = self._window.limit()
            bad = bad | (self._loss > self._limit)
        self.check = StepCheck(bad, gradients=self._gradients, masks=self._masks)
        trainer.precision.check_step(self.check)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        check, loss, limit = self.check, self._loss, self._limit
        assert check is not None  # created before the step
        assert loss is not None
        self.check = self._loss = self._limit = None
        if self._window is not None:
            self._window.add(loss, check.bad)
        if self._masks:
            self._num_skipped = self._num_skipped + check.bad
            self._restore_buffers(trainer, check.bad)
            trainer.log_metrics(skipped_steps=self._num_skipped)
        figures = {"loss": loss, "norm": check.norm, "limit": limit}
        known = {name: value for name, value in figures.items() if value is not None}
        arrive = partial(self._arrive, trainer, list(known), self._batches)
        trainer.read([check.bad, *known.values()], arrive)
        self.drop_batches()

    def _arrive(
        self, trainer: Trainer, names: list[str], batches: Batches, values: list[Any]
    ) -> None:
        figures = dict(zip(names, values[1:], strict=True))
        finding = StepFinding(
            step=trainer.global_step, is_bad=bool(values[0]), batches=batches, **figures
        )
        self._report(trainer, finding)

    def _buffers(self) -> list[tuple[_Place, Tensor | None]]:
        """Return the current buffers with their places."""
        if self._structure is None or not self._structure.is_current():
            self._structure = ModelStructure(self._model)
            parts = [part._buffers for part in self._model.modules()]
            self._places = [(table, key) for table in parts for key in table]
        return [((table, key), table.get(key)) for table, key in self._places]

    def _restore_buffers(self, trainer: Trainer, bad: Tensor) -> None:
        found = [(table.get(key), copy) for (table, key), copy in self._copies]
        pairs = [
            (own, copy)
            for own, copy in found
            if own is not None and copy is not None and own.shape == copy.shape
        ]
        if pairs:
            owns, copies = zip(*pairs, strict=True)
            trainer.backend.restore(owns, copies, bad.logical_not())

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return the state that affects later steps."""
        state: dict[str, Any] = {"num_skipped": self._num_skipped}
        if self._window is not None:
            state["window"] = self._window.state_dict()
        if self._batches:
            state["open"] = {**self.open_batches(), "buffers": [copy for _, copy in self._copies]}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._num_skipped = state["num_skipped"].to(self._device)
        if self._window is not None and "window" in state:
            self._window.load_state_dict(state["window"])
        self.drop_batches()
        if "open" in state:
            part = state["open"]
            self.load_open_batches(part, self._device)
            copies = [placed(copy, self._device) for copy in part["buffers"]]
            places = [place for place, _ in self._buffers()]
            self._copies = list(zip(places, copies, strict=False))
