"""Run two steps on fake tensors to measure a plan."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from modelzoo_trainer.base.devices import (
    BackendError,
    fake_world_backend,
    map_tensors,
)
from modelzoo_trainer.callback import Batch, Callback, Outputs
from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags
from modelzoo_trainer.core.loop import TrainingLoop
from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batches import batch_size_of, split_batch
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.loading.epochs import resolve_loader
from modelzoo_trainer.tools.planning.figures import Figures, checkpoint_sizes, sizes_of
from modelzoo_trainer.tools.planning.memory_tracker import MemoryKind, MemoryTracker

if TYPE_CHECKING:
    from modelzoo_trainer.config.plan import TrainerPlan
    from modelzoo_trainer.trainer import Trainer

_NUM_STEPS: Final = 2  # the second has optimizer state and the first's buffers
_AXES: Final = ("replicate", "shard", "context", "tensor")
_LEFT_OUT: Final = ("loggers", "checkpoint", "logging", "autorestart")
_DIVIDES: Final = (GlobalFlags, ScopedTrainFlags)  # they may set the micro-batch size


def measure(plan: TrainerPlan) -> Figures:
    """Run two steps on fake tensors as rank 0 of many processes and return what they need.

    One batch is loaded for its shapes. Nothing is written, and no device is used.

    `plan`: one trainer of a file; inside `fake_world`.

    Raises:
        ConfigError: If the plan does not train, or the processes do not fit it.
    """
    if plan.method != "fit":
        raise ConfigError(f"plan requires mode train or train_and_eval, got {plan.mode}.")
    if "train_dataloader" not in plan.call:
        raise ConfigError(
            "plan requires a configuration file that runs fit: set fit.train_dataloader."
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with TemporaryDirectory() as folder:
            own, on_host = _without_side_effects(plan, folder)
            tracker = MemoryTracker(mode, on_host=on_host)
            with _measured(mode, tracker):
                trainer = own.build()
            trainer.interruptions.leave_signals()  # there is nothing to save
            try:
                batch = _first_batch(plan, trainer.model)
                with _measured(mode, tracker):
                    return _steps(plan, trainer, batch, tracker, mode)
            finally:
                trainer.close()
    except BackendError as error:
        raise ConfigError(str(error)) from None


def _without_side_effects(plan: TrainerPlan, folder: str) -> tuple[TrainerPlan, bool]:
    """Return the plan without callbacks and options that write, read or use other processes.

    Returns:
        The plan, and whether the model would be in host memory.
    """
    own = dataclasses.replace(plan, init=dict(plan.init), defaults=copy.copy(plan.defaults))
    for key in _LEFT_OUT:
        own.init.pop(key, None)
    given = own.init.get("device"), own.init.get("backend")
    own.init["device"], own.init["backend"], on_host = fake_world_backend(*given)
    own.init["model_dir"] = folder
    own.init["progress"] = "none"  # two fake steps are no run to report
    own.init["callbacks"] = [
        one for one in own.init.get("callbacks", ()) if getattr(one, "target", None) in _DIVIDES
    ]
    own.defaults.update(callbacks=[], loggers=[])
    loop = own.init.get("loop")
    num = 1 if loop is None else loop.arguments.get("grad_accum_steps", 1)
    own.init["loop"] = TrainingLoop(max_steps=_NUM_STEPS, grad_accum_steps=num, eval_frequency=None)
    return own, on_host


@contextmanager
def _measured(mode: FakeTensorMode, tracker: MemoryTracker) -> Iterator[None]:
    """Make all tensors fake, and track them."""
    with mode, tracker, tracker.following_sizes(), _without_hints():
        yield


@contextmanager
def _without_hints() -> Iterator[None]:
    """Hide hints about schedules, which would compare them with the two steps."""
    log = logging.getLogger("modelzoo_trainer.schedulers")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _first_batch(plan: TrainerPlan, model: Module) -> tuple[Batch, bool]:
    """Return the loader's first batch, and whether it is for all processes.

    `model`: whose settings the data may follow.
    """
    with lengths_of(model):
        made = plan.call["train_dataloader"].build()
        loader = resolve_loader(getattr(made, "create_dataloader", made), "train_dataloader")
    check_model(loader, model)
    for batch in loader:
        return batch, getattr(loader, "is_global_batch", False) is True
    raise ConfigError(
        "train_dataloader yields no batch. Check the data, the split, and whether drop_last with "
        "this batch_size drops all samples."
    )


class _Copies:
    """The same batch repeated; every process has its own copy of the same shape."""

    def __init__(self, batch: Batch, num: int) -> None:
        self._batch = batch
        self._num = num

    def __iter__(self) -> Iterator[Batch]:
        return iter([self._batch] * self._num)


def _steps(
    plan: TrainerPlan,
    trainer: Trainer,
    loaded: tuple[Batch, bool],
    tracker: MemoryTracker,
    mode: Any,
) -> Figures:
    model, backend = trainer.compiled_model, trainer.backend
    tracker.label(model.parameters(), MemoryKind.PARAMETERS)
    tracker.label(model.buffers(), MemoryKind.BUFFERS)
    building = tracker.peak()
    batch, is_global = loaded
    num_shards = backend.comm.data_shard[1]
    if is_global:
        batch = _share(batch, num_shards)
    batch = map_tensors(batch, mode.from_tensor)
    tracker.label(
        (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), MemoryKind.BATCH
    )
    follower = _Follower(tracker)
    trainer.add_callback(follower)
    loop = trainer.loop
    assert isinstance(loop, TrainingLoop)  # made above
    trainer.fit(_Copies(batch, _NUM_STEPS * loop.grad_accum_steps), ckpt_path=None)
    world_size = backend.comm.world_size
    states = [trainer.model.state_dict()]
    states += [one.state_dict()["state"] for one in trainer.optimizers.values()]
    total, here = checkpoint_sizes(states, world_size)
    num_params, num_here = sizes_of(trainer.model.parameters())
    axes = getattr(backend, "sizes", None)
    return Figures(
        world_size=world_size,
        axes={} if axes is None else {name: getattr(axes, name) for name in _AXES},
        device=str(plan.init.get("device") or "cpu"),
        num_data_shards=num_shards,
        batch_size=batch_size_of(batch),
        num_batches=follower.num_batches,
        num_params=num_params,
        num_params_here=num_here,
        building=building,
        training=tracker.peak(follower.begin),
        exchanges=follower.exchanges,
        flops=follower.flops,
        num_host_reads=follower.num_host_reads,
        checkpoint_bytes=total,
        checkpoint_bytes_here=here,
    )


def _share(batch: Batch, num: int) -> Batch:
    size = batch_size_of(batch)
    if size % num:
        raise ConfigError(
            f"train_dataloader: a batch size of {size} over all processes is not divisible by the "
            f"data-parallel size {num}. Use a multiple of {num} or another --world-size."
        )
    return split_batch(batch, size // num)[0]


class _Follower(Callback):
    """Label memory for the tracker, and mark where steps start and end."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._num_steps = 0
        self.begin = 0
        self.num_batches = 0
        self.flops = 0
        self.num_host_reads = 0
        self.exchanges: dict[Any, Any] = {}

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        if not self.begin:
            self.begin = self._tracker.place()
        if self._num_steps:
            self.num_batches += 1

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        self._tracker.finish_exchange()
        params = trainer.compiled_model.parameters()
        grads = [param.grad for param in params if param.grad is not None]
        self._tracker.label(grads, MemoryKind.GRADIENTS)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        state = tree_leaves(list(optimizer.state.values()))
        tensors = [leaf for leaf in state if isinstance(leaf, Tensor)]
        self._tracker.label(tensors, MemoryKind.OPTIMIZER)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self._num_steps += 1
        tracker = self._tracker
        if self._num_steps == _NUM_STEPS:
            self.flops, self.num_host_reads = tracker.flops, tracker.num_host_reads
            self.exchanges = tracker.exchanges
        tracker.clear_counts()
