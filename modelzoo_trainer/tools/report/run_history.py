"""The metrics of a run in memory, and the training loss of each epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import Count, PositiveInt, checked_dataclass
from modelzoo_trainer.base.devices import map_tensors
from modelzoo_trainer.callback import Batch, Callback, Loader, Metrics, Outputs, StateDict
from modelzoo_trainer.core.loss_accum import WeightedMean, take_all
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

TRAIN_LOSS_EPOCH: Final = "train_loss_epoch"
_STATE: Final = "epoch_loss"
_CHART: Final = 200  # pixels; height of a chart
_BETWEEN: Final = 90  # for the numbers and the title of the x axis, and the title of the next chart
_MARGIN: Final = 60


class EpochLoss(Callback):
    """Base class of callbacks that log `train_loss_epoch`; of several, only the first one does.

    Not logged for an epoch that had begun before this callback was added to a resumed run.

    State: `epoch_loss`: the mean so far, within an epoch only.

    Cost: A step adds one number on the device; the end of an epoch all-reduces two numbers.
    """

    def __init__(self) -> None:
        self._mean = WeightedMean(double=True)
        self._window: list[tuple[Tensor, Any]] = []  # batches since the last optimizer step
        self._is_first = False
        self._lacks_some = False  # of the samples of this epoch
        self._previous = self._mean, False  # of the fit before this one

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
        self._previous = self._mean, self._lacks_some
        self._mean, self._lacks_some = WeightedMean(double=trainer.backend.caps.float64), False

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if trainer.schedule.is_continued:
            self._mean, lacked_some = self._previous
            is_late = not (self._mean.is_used or trainer.data.is_between_epochs)
            self._lacks_some = lacked_some or is_late

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        stack.callback(self._window.clear)  # of a step interrupted by a stop

    @override
    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        if self._is_first and not self._mean.is_used:  # so that all steps have the same graph
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
                trainer.logging.collect(trainer, mean, trainer.global_step)  # on any step
                trainer.drain()  # before its weights change

    # ---- state: each process has a partial sum

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        own = self._mean.state_dict()
        if not self._is_first or own is None:
            return
        shard, num_shards = trainer.backend.comm.data_shard
        state: dict[str, Any] = {"means": [own]}
        if num_shards > 1:
            rows = torch.zeros(num_shards, 2, dtype=own["sum"].dtype, device=own["sum"].device)
            rows[shard, 0], rows[shard, 1] = own["sum"], own["weight"]
            rows = trainer.backend.comm.reduce(rows)
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
        shard, num_shards = trainer.backend.comm.data_shard
        state = state_dict.get(_STATE, {"means": [None] * num_shards})
        state = map_tensors(state, lambda tensor: tensor.to(device, copy=True))
        self._window[:] = [(loss, weight) for loss, weight in state.get("window", ())]
        means = state["means"]
        if len(means) != num_shards:  # the world size has changed: rank 0 gets the whole sum
            total = {key: sum(mean[key] for mean in means) for key in ("sum", "weight")}
            nothing = {"sum": torch.zeros_like(total["sum"]), "weight": 0}
            means = [total, *[nothing] * (num_shards - 1)]
        self._mean.load_state_dict(means[shard], device)


def _weight(trainer: Trainer, outputs: Outputs, batch: Batch) -> Any:
    if trainer.grad_accum.is_active:
        return trainer.grad_accum.weight
    try:
        return trainer.weight_of(outputs, batch)
    except ConfigError:  # batches of unknown size have equal weights
        return 1


_Series = deque[tuple[int, float]]


def _figure(series: Mapping[str, _Series], log_y: bool) -> Any:
    """Return a figure with a chart for each series, in two columns."""
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise ConfigError(
            "RunHistory.plot requires plotly, which is not installed: "
            "pip install 'modelzoo-trainer[report]'"
        ) from None
    num_columns = min(2, len(series))
    num_rows = -(-len(series) // num_columns)
    titles = list(series)
    drawn = _CHART * num_rows + _BETWEEN * (num_rows - 1)
    figure = make_subplots(
        num_rows, num_columns, subplot_titles=titles, vertical_spacing=_BETWEEN / drawn
    )
    for idx, (name, pairs) in enumerate(series.items()):
        row, column = divmod(idx, num_columns)
        steps, values = [step for step, _ in pairs], [value for _, value in pairs]
        mode = "lines+markers" if len(pairs) <= 60 else "lines"
        trace = {"type": "scatter", "x": steps, "y": values, "name": name, "mode": mode}
        place = {"row": row + 1, "col": column + 1}
        figure.add_trace(trace, **place)
        if len(set(values)) == 1 and not log_y:  # plotly would draw it between value - 1 and + 1
            figure.update_yaxes(rangemode="tozero", **place)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(type="log" if log_y else "linear")
    margins = {"t": _MARGIN, "b": _MARGIN}
    figure.update_layout(showlegend=False, height=drawn + 2 * _MARGIN, margin=margins)
    return figure


@checked_dataclass
class RunHistory(EpochLoss):
    """Keep the last values of every scalar metric in memory.

    A run that resumes or rolls back has the values up to its checkpoint. Reading does not change
    anything; in particular, it does not create a metric that was never logged.

    At the end of each epoch `train_loss_epoch` is logged, regardless of `log_steps`.

    Args:
        max_values: Maximum number of values per metric, > 0; the oldest are dropped.
        max_metrics: Maximum number of metrics, > 0; later ones are ignored.
        reset_on_fit: Whether to clear the history at the beginning of each fit; a fit that resumes
            from a checkpoint of the run never clears it.
        reset_on_validate: Whether to clear it at the beginning of a validation outside `fit`.

    Metrics:
        train_loss_epoch: The mean of `loss` over the samples of the epoch (over `num_items` if the
            model's output has it) and over all processes. Batches of unknown size have equal
            weights.

    State: All values, 16 bytes each; within an epoch, `epoch_loss`: the mean so far.

    Raises:
        ConfigError: If a number is not positive.
    """

    state_is_of_run = True

    max_values: Count = 1000
    max_metrics: PositiveInt = 1000
    reset_on_fit: bool = True
    reset_on_validate: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.metric_name_prefix = ""
        """Prefix of the names of metrics that are added from now on."""
        self._epoch = 1
        self._step = 0
        self._series: dict[str, _Series] = {}

    # ---- reading

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 1."""
        return self._epoch

    def get_metric_names(self) -> set[str]:
        """Return the names of all metrics that have a value."""
        return set(self._series)

    def get_metric_values(self, name: str) -> list[float]:
        """Return the values of a metric, oldest first; empty if there is no such metric."""
        return [value for _, value in self._series.get(name, ())]

    def get_metric_steps(self, name: str) -> list[int]:
        """Return the `global_step` of each value of a metric."""
        return [step for step, _ in self._series.get(name, ())]

    def get_latest_metric(self, name: str) -> float:
        """Return the latest value of a metric.

        Raises:
            ValueError: If it has none.
        """
        if name not in self._series:
            raise ValueError(f"RunHistory has no metric {name!r}. {suggest(name, self._series)}")
        return self._series[name][-1][1]

    def plot(self, names: str | Iterable[str] | None = None, *, log_y: bool = False) -> Any:
        """Draw metrics against the step, in a figure that a notebook shows.

        Args:
            names: A metric, or several; None = all.
            log_y: Whether the y axes are logarithmic.

        Returns:
            A `plotly.graph_objects.Figure` with a chart for each metric.

        Raises:
            ConfigError: If plotly is not installed.
            ValueError: If a metric has no value, or none has one.
        """
        chosen = [names] if isinstance(names, str) else list(names or sorted(self._series))
        if not chosen:
            raise ValueError("RunHistory.plot: no metric was logged.")
        for name in chosen:
            self.get_latest_metric(name)
        return _figure({name: self._series[name] for name in chosen}, log_y)

    # ---- writing

    def update_metric(self, name: str, value: float, step: int | None = None) -> None:
        """Add a value to a metric.

        Args:
                name: Name, without the prefix.
                value: Value on the host.
                step: Its `global_step`; None = the step of the latest metrics.

        Raises:
            TypeError: If the value is not a number.
        """
        if not isinstance(value, Real):
            raise TypeError(
                f"{name!r} is a {type(value).__name__}; RunHistory stores only numbers."
            )
        name = self.metric_name_prefix + name
        if name not in self._series:
            if len(self._series) >= self.max_metrics:
                return
            self._series[name] = deque(maxlen=self.max_values)
        self._series[name].append((self._step if step is None else step, float(value)))

    def delete_metric(self, name: str) -> None:
        """Remove a metric.

        Raises:
            KeyError: If there is no such metric.
        """
        if name not in self._series:
            raise KeyError(f"RunHistory has no metric {name!r}. {suggest(name, self._series)}")
        del self._series[name]

    def set_metric_name_prefix(self, prefix: str) -> None:
        """Set the prefix of the names of metrics that are added from now on; "" = none."""
        self.metric_name_prefix = prefix

    def reset(self) -> None:
        """Remove all values and restart at epoch 1; the prefix is kept."""
        self._series = {}
        self._epoch, self._step = 1, 0

    # ---- hooks

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        super().on_enter_fit(trainer, stack, train_dataloader, val_dataloader, loop)
        if self.reset_on_fit:
            self.reset()

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if self.reset_on_validate and not trainer.is_fitting:
            self.reset()

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        super().on_train_epoch_end(trainer, epoch)
        self._epoch += 1

    @override
    def on_metrics(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        self._step = step
        for name, value in metrics.items():
            if isinstance(value, Real):
                self.update_metric(name, value, step)  # type: ignore[arg-type]  # becomes a float

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return all values, in one tensor for all metrics."""
        pairs = [pair for series in self._series.values() for pair in series]
        return {
            "epoch": self._epoch,
            "step": self._step,
            "prefix": self.metric_name_prefix,
            "names": list(self._series),
            "lengths": [len(series) for series in self._series.values()],
            "steps": torch.tensor([step for step, _ in pairs], dtype=torch.int64),
            "values": torch.tensor([value for _, value in pairs], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values."""
        self._epoch, self._step = state["epoch"], state["step"]
        self.metric_name_prefix = state["prefix"]
        pairs = zip(state["steps"].tolist(), state["values"].tolist(), strict=True)
        self._series = {}
        for name, length in zip(state["names"], state["lengths"], strict=True):
            kept = [next(pairs) for _ in range(length)]
            self._series[name] = deque(kept, maxlen=self.max_values)
