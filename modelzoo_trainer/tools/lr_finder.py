"""A learning-rate range test before training."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from typing_extensions import override

from modelzoo_trainer.base.constraints import FinitePositiveFloat, checked_dataclass
from modelzoo_trainer.base.devices import Stream
from modelzoo_trainer.callback import Batch, Callback, Loader
from modelzoo_trainer.core.model import require_loss
from modelzoo_trainer.core.parts.manual_steps import overrides_training_step
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.table import HookTable
from modelzoo_trainer.loading.attribute_values import has_state
from modelzoo_trainer.loading.epochs import EpochIterator
from modelzoo_trainer.loading.hidden_state import changed, snapshot
from modelzoo_trainer.loading.position import EpochSeeds, Position
from modelzoo_trainer.loading.source import hidden_state_of
from modelzoo_trainer.loading.train_data import TrainData
from modelzoo_trainer.loading.workers import shut_down
from modelzoo_trainer.optim.scheduler import LR_FACTOR
from modelzoo_trainer.tools.run_snapshot import RunSnapshot

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.lr_finder")

FILE_NAME: Final = "lr_finder.csv"
_COLUMNS: Final = ("step", "lr", "loss", "smoothed_loss")
_FEW: Final = 3  # minimum number of losses to average
_AS_ITERATOR: Final = (
    "Remove LRFinder, or pass a callable that creates the dataloader and returns an iterator over "
    "it: lambda: iter(create_dataloader())"
)
NumSteps = Annotated[int, Ge(10)]


@checked_dataclass
class LRFinder(Callback):
    """Suggest a learning rate by a range test before training, then restore the run.

    The test takes up to `num_steps` steps over the training data, with learning rates that increase
    exponentially from `start_lr` to `end_lr` (Smith 2015, Cyclical learning rates for training
    neural networks, arXiv:1506.01186). It stops early if the loss diverges. Then weights, buffers,
    optimizer, loss scale, random generators and data are restored exactly, and training starts with
    its configured learning rate. The suggestion is logged: the learning rate where the smoothed
    loss decreases most steeply, before its minimum. The losses are in `lr_finder.csv` in the
    folder of the run's log.

    Steps use the batches, the precision and the gradient clipping of the run, and the factors of
    `adjust_learning_rate`, but no schedulers or other callbacks. State outside of lists, dicts and
    tensors of the model, and state of interceptors, is not restored.

    A resumed run skips the test.

    Args:
        start_lr: The first learning rate, > 0.
        end_lr: The last learning rate, > `start_lr`.
        num_steps: Number of steps, >= 10.
        divergence: Stop when the mean of the latest losses is this many times its minimum, > 1.
        stop_after: Stop the run after the test instead of training.

    Raises:
        ConfigError: If an argument is invalid; at the start of training, if the test is not
            possible or cannot be undone: several optimizers or one without a learning rate, a
            custom `training_step`, sparsity, a lazy model, a device that compiles each graph, or
            data that cannot be restarted, such as an iterator.

    Cost: `num_steps` steps, each with a host read; a copy of the weights and of the optimizer
        state on the device.
    """

    needs_trainer = True
    needs_one_optimizer = True

    start_lr: FinitePositiveFloat = 1e-7
    end_lr: FinitePositiveFloat = 10.0
    num_steps: NumSteps = 100
    divergence: FinitePositiveFloat = 4.0
    stop_after: bool = False

    def __post_init__(self) -> None:
        if self.start_lr >= self.end_lr:
            raise ConfigError(
                f"LRFinder: end_lr ({self.end_lr}) must be larger than start_lr ({self.start_lr})."
            )
        if self.divergence <= 1:
            raise ConfigError(
                f"LRFinder.divergence is {self.divergence}; it must be larger than 1."
            )
        self.lrs: list[float] = []
        """The learning rates of the test."""
        self.losses: list[float] = []
        """The loss at each learning rate, over all processes."""
        self.smoothed: list[float] = []
        """The losses, smoothed by a moving average."""
        self.suggestion: float | None = None
        """The suggested learning rate; None = no test, or no suggestion."""
        self._given: Loader = None
        self._is_due = False

    # ---- when

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._given, self._is_due = train_dataloader, True
        stack.callback(setattr, self, "_given", None)

    @override
    def on_train_ready(self, trainer: Trainer) -> None:
        is_due, self._is_due = self._is_due, False
        if not is_due or not trainer.backend.caps.holds_values:
            return
        if trainer.global_step:
            log.info("LRFinder: skipped, since the run resumes at step %d.", trainer.global_step)
            return
        self._refuse(trainer)
        with _undone(trainer) as data:
            self._test(trainer, data if data is not None else self._given)
        self.smoothed = smooth(self.losses)
        self.suggestion = suggested(self.lrs, self.losses)
        self._report(trainer)
        if self.stop_after:
            trainer.early_exit.stop_all("LRFinder: the test has finished, and stop_after is set")

    def _refuse(self, trainer: Trainer) -> None:
        """Check that the test is possible and can be undone.

        Raises:
            ConfigError: If not.
        """
        loader = trainer.data.loader
        groups = trainer.optimizer.param_groups
        for why, fails in (
            (
                "the trainer's class overrides training_step",
                overrides_training_step(trainer),
            ),
            (
                "sparsity changes which weights are trained",
                bool(trainer.callbacks["sparsity"].params),
            ),
            ("the device compiles a graph for each learning rate", trainer.backend.caps.lazy),
            ("the model has lazy parameters", any(map(is_lazy, _params(trainer)))),
            ("the optimizer has no lr", any("lr" not in group for group in groups)),
            (
                "train_dataloader is an iterator; pass a callable that returns a new one",
                isinstance(loader, Iterator) and self._given is loader,
            ),
            (
                f"train_dataloader ({type(loader).__name__}) is stateful. {_AS_ITERATOR}",
                has_state(loader),
            ),
        ):
            if fails:
                raise ConfigError(f"LRFinder cannot test learning rates here: {why}.")

    # ---- the test

    def _test(self, trainer: Trainer, given: Loader) -> None:
        self.lrs, self.losses, self.smoothed = [], [], []
        factors = [group.get(LR_FACTOR, 1.0) for group in trainer.optimizer.param_groups]
        growth = (self.end_lr / self.start_lr) ** (1 / (self.num_steps - 1))
        steps = _steps(trainer, given)
        try:
            for idx, parts in zip(range(self.num_steps), steps, strict=False):
                lr = self.start_lr * growth**idx
                _set_lr(trainer, lr, factors)
                loss = _take_step(trainer, parts, idx)
                if not math.isfinite(loss):
                    return
                self.lrs.append(lr)
                self.losses.append(loss)
                if self._diverges():
                    return
        finally:
            steps.close()

    def _diverges(self) -> bool:
        """Return whether the mean of the latest losses is too far above its minimum."""
        num = max(_FEW, self.num_steps // 20)
        means = [
            sum(self.losses[end - num : end]) / num for end in range(num, len(self.losses) + 1)
        ]
        lowest = min(means, default=0.0)
        return bool(means) and means[-1] > lowest + (self.divergence - 1) * abs(lowest)

    # ---- the result

    def _report(self, trainer: Trainer) -> None:
        path = trainer.artifact_dir / FILE_NAME
        if trainer.backend.comm.is_main:
            self._write(path)
        tried = f"no step: the loss is non-finite at lr {self.start_lr:.3g}"
        if self.lrs:
            tried = f"{len(self.lrs)} steps, lr {self.start_lr:.3g} to {self.lrs[-1]:.3g}"
        if self.suggestion is None:
            log.warning(
                "LRFinder: no suggestion, because the loss did not decrease (%s). Use another "
                "start_lr or end_lr. The losses are in %s.",
                tried,
                path,
            )
            return
        lowest = self.lrs[self.smoothed.index(min(self.smoothed))]
        log.info(
            "LRFinder: suggested lr %.3g (%s; the smoothed loss is lowest at lr %.3g). The losses "
            "are in %s.",
            self.suggestion,
            tried,
            lowest,
            path,
        )

    def _write(self, path: Path) -> None:
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(_COLUMNS)
                writer.writerows(zip(count(1), self.lrs, self.losses, self.smoothed))
        except OSError as error:
            log.warning("Cannot write %s: %s.", path, error.strerror or error)

    def plot(self, axes: Any = None) -> Any:
        """Plot the losses over the learning rates, with the suggestion.

        Args:
            axes: Matplotlib axes to draw into; None = new ones.

        Returns:
            The axes.

        Raises:
            ConfigError: If there was no test, or matplotlib is not installed.
        """
        if not self.lrs:
            raise ConfigError(
                "LRFinder has nothing to plot before its learning rate test. Call fit first."
            )
        if axes is None:
            axes = _new_axes()
        axes.plot(self.lrs, self.losses, alpha=0.3, label="loss")
        axes.plot(self.lrs, self.smoothed, label="smoothed loss")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--", label=f"lr {self.suggestion:.3g}")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.legend()
        return axes


def smooth(losses: list[float]) -> list[float]:
    """Return a moving average of losses over 1 in 20 of all on either side."""
    width = max(1, len(losses) // 20)
    around = [losses[max(0, idx - width) : idx + width + 1] for idx in range(len(losses))]
    return [sum(values) / len(values) for values in around]


def suggested(lrs: list[float], losses: list[float]) -> float | None:
    """Return the learning rate where the loss decreases most steeply, before its minimum.

    The slope belongs to a regression line through the smoothed losses over the logarithm of the
    learning rate, 1 in 10 of all on either side. None if the loss does not decrease.
    """
    smoothed, width = smooth(losses), max(_FEW, len(losses) // 10)
    lowest = min(
        range(width, len(losses)), key=lambda idx: smoothed[idx], default=0
    )  # the first few vary most
    slopes = {idx: _slope(lrs, smoothed, idx, width) for idx in range(width, lowest + 1)}
    if not slopes:
        return None
    steepest = min(slopes, key=lambda idx: slopes[idx])
    return lrs[steepest] if slopes[steepest] < 0 else None


def _slope(lrs: list[float], losses: list[float], idx: int, width: int) -> float:
    """Return the slope of the least-squares line around an index."""
    around = slice(max(0, idx - width), idx + width + 1)
    places, values = [math.log(lr) for lr in lrs[around]], losses[around]
    middle, mean = sum(places) / len(places), sum(values) / len(values)
    pairs = zip(places, values, strict=True)
    products = sum((place - middle) * (value - mean) for place, value in pairs)
    return products / sum((place - middle) ** 2 for place in places)


def _new_axes() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("LRFinder.plot requires matplotlib: pip install matplotlib.") from None
    return pyplot.subplots()[1]


# ---- undo


@contextmanager
def _undone(trainer: Trainer) -> Iterator[Any]:
    """Yield the loader for the test, None = a new one; undo the effects of the block.

    Raises:
        ConfigError: If the loader cannot be restored.
    """
    loader = trainer.data.loader
    trainer.drain()
    saved = RunSnapshot(trainer)
    hidden = None if isinstance(loader, Iterator) else hidden_state_of(loader)
    before = {} if hidden is None else snapshot(hidden.owners)
    _refuse_iterators(hidden)
    state = None if hidden is None else hidden.save()
    kept_iterator = getattr(loader, "_iterator", None)  # of persistent workers
    hooks = trainer.hooks
    trainer.hooks = HookTable(on_stop=trainer.early_exit.request_stop)  # calls nobody
    try:
        with trainer.logging.disabled(trainer):
            yield None if isinstance(loader, Iterator) else loader
    finally:
        trainer.hooks = hooks
        if getattr(loader, "_iterator", None) is not kept_iterator:
            shut_down(loader._iterator)  # type: ignore[union-attr]  # a DataLoader's
            loader._iterator = kept_iterator  # type: ignore[union-attr]
        if hidden is not None and state is not None:
            hidden.load(state)
        trainer.backend.window.reset()
        saved.restore()
    names = [] if hidden is None else changed(before, snapshot(hidden.owners))
    if names:
        raise ConfigError(
            f"LRFinder: train_dataloader cannot be restored after the test: "
            f"{', '.join(names[:4])} changed. {_AS_ITERATOR}."
        )


def _refuse_iterators(hidden: Any) -> None:
    found = [] if hidden is None else hidden.iterators()
    if found:
        raise ConfigError(
            f"LRFinder cannot test learning rates here: train_dataloader keeps an iterator "
            f"({', '.join(found)}), which cannot be restored. {_AS_ITERATOR}."
        )


# ---- steps


def _params(trainer: Trainer) -> list[Tensor]:
    return list(trainer.model.parameters())


def _steps(trainer: Trainer, given: Loader) -> Generator[list[Batch], None, None]:
    """Yield the batches of each step, on the device, with equal samples on all processes."""
    backend, size = trainer.backend, trainer.data.micro_batch_size
    num = trainer.grad_accum.num
    for epoch in count():
        data = TrainData(given, None, backend, "train_dataloader of LRFinder")
        seeds = EpochSeeds.of(backend, epoch).of_validation()
        position = Position(epoch=epoch, layout=data.layout())
        begun = data.begin(position, seeds, needs_sizes=size is not None)
        batches = EpochIterator(begun, backend.batches, micro_batch_size=size)
        is_empty = True
        try:
            for parts in _grouped(batches, num):
                is_empty = False
                yield parts
        finally:
            batches.close()
        if is_empty:
            raise ConfigError(
                f"LRFinder: train_dataloader has too few batches for one step "
                f"(grad_accum_steps={num}). Use more data, or a smaller grad_accum_steps."
            )


def _grouped(batches: EpochIterator, num: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of `num` batches at a time; skip uneven ones."""
    parts: list[Batch] = []
    num_whole, is_even = 0, True
    while not batches.is_last:
        batch = next(batches, None)
        if batches.num_yielded == 0:
            return
        parts.append(batch)
        is_even = is_even and batches.is_even
        num_whole += batches.ends_batch
        if num_whole == num and batches.ends_batch:
            if is_even:
                yield parts
            parts, num_whole, is_even = [], 0, True


def _set_lr(trainer: Trainer, lr: float, factors: list[float]) -> None:
    for group, factor in zip(trainer.optimizer.param_groups, factors, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * factor)
        else:
            group["lr"] = lr * factor


def _take_step(trainer: Trainer, parts: list[Batch], idx: int) -> float:
    """Take a step as training does, and return its mean loss. Collective; waits for the device."""
    backend, precision, optimizer = trainer.backend, trainer.precision, trainer.optimizer
    losses: list[Tensor] = []
    for number, part in enumerate(parts, 1):
        is_last = number == len(parts)
        place = idx * len(parts) + number
        with (
            backend.step(place, Stream.VALIDATE),
            nullcontext() if is_last else backend.accumulating(),
        ):
            outputs = trainer.forward(part)
            require_loss(trainer, outputs)
            loss = outputs["loss"] / len(parts)
            if backend.comm.world_size > 1:
                backend.window.add(1 / len(parts))  # reduced with the gradients
            precision.backward(loss)
            losses.append(loss.detach().reshape(()).float())
            if is_last:
                precision.on_before_optimizer_step(trainer, trainer.model, optimizer)
                precision.optimizer_step(optimizer)
                _drop_gradients(trainer.model)
                backend.zero_grad(optimizer)
    backend.window.reset()
    mean = torch.stack(losses).sum()
    if backend.comm.world_size > 1:
        mean = backend.comm.reduce(mean, "mean")
    return float(backend.host_state(mean))


def _drop_gradients(model: Module) -> None:
    for param in model.parameters():
        param.grad = None
