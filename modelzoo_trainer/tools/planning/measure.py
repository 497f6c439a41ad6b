"""Run two steps on fake tensors to measure a plan."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
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
    num_buckets,
)
from modelzoo_trainer.callback import Batch, Callback, Outputs
from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags
from modelzoo_trainer.core.loop import TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.planning.figures import (
    Figures,
    Measured,
    Setting,
    checkpoint_sizes,
    figures_of,
    sizes_of,
)
from modelzoo_trainer.tools.planning.memory_tracker import (
    EXCHANGE,
    NOWHERE,
    MemoryKind,
    MemoryTracker,
)
from modelzoo_trainer.tools.planning.repeats import (
    Repeat,
    extrapolated,
    leave_out,
    repeats_of,
    shorten,
)
from modelzoo_trainer.tools.planning.sample_batches import (
    Copies,
    LocalBatch,
    Samples,
    find_samples,
    local_batch,
    repeated,
)

if TYPE_CHECKING:
    from modelzoo_trainer.config.plan import TrainerPlan
    from modelzoo_trainer.trainer import Trainer

MeasuredElsewhere = Callable[[], "list[Measured] | None"]

_NUM_STEPS: Final = 2  # the second has optimizer state and the first's buffers
_AXES: Final = ("replicate", "shard", "context", "tensor")
_LEFT_OUT: Final = ("loggers", "checkpoint", "logging", "autorestart")
_DIVIDES: Final = (GlobalFlags, ScopedTrainFlags)  # they may set the micro-batch size
_HINTS: Final = ("modelzoo_trainer.schedulers", "torch.distributed.tensor._redistribute")
_PLACING, _UPDATING, _TRAINING = "place the model", "first update", "batch"
_BUILDING: Final = ("", _PLACING)


class Built:
    """A model that was built on `meta`, with few of its repeated layers, to be used again.

    Building a model of a hundred layers takes as long as its steps, and many runs are compared.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        """The mode of all tensors: tensors of two modes cannot be used together."""
        self._model: tuple[Module, list[Repeat]] | None = None

    def build(self, component: Any) -> tuple[Module, list[Repeat]]:
        """Return a new model, which may have few of its repeated layers, and what repeats."""
        if torch.empty(0).device != NOWHERE:
            model = component.build()
            return model, repeats_of(model)
        if self._model is None:
            model = component.build()
            repeats = repeats_of(model)
            leave_out(model, repeats)
            self._model = model, repeats
        model, repeats = self._model
        return copy.deepcopy(model), repeats


def measure(
    plan: TrainerPlan,
    *,
    use_data: bool = False,
    all_layers: bool = False,
    one_step: bool = False,
    built: Built | None = None,
    longer: MeasuredElsewhere | None = None,
) -> Figures:
    """Run two steps on fake tensors as rank 0 of many processes and return what they need.

    Of layers that repeat, a few are measured, and the figures of all follow from them. Nothing is
    written, and no device is used.

    Args:
        plan: One trainer of a file; inside `fake_world`.
        use_data: Whether to take the shapes of a batch from the data, instead of from the settings
            of the data processor, where these suffice.
        all_layers: Whether to measure all layers.
        one_step: Whether to measure the first step alone, with the state that an optimizer has
            after it: in less time, but with the few small messages of the start of a run.
        built: The model of former measurements with the same `model`; None = there are none.
        longer: Waits for what `measure_longer` returns in another process; it returns None if that
            failed. None = measure all here.

    Raises:
        ConfigError: If the plan does not train, or the processes do not fit it.
    """
    _check(plan)
    if not all_layers:
        built = Built() if built is None else built
        found = _with_few_layers(plan, built, longer, use_data=use_data, one_step=one_step)
        if found is not None:
            return found
    measured, _ = _Run(plan, use_data=use_data, one_step=one_step).measure()
    return figures_of(measured)


def measure_longer(plan: TrainerPlan, built: Built, **how: bool) -> list[Measured]:
    """Return what `measure` compares with the model with fewest layers.

    Each result is of a model with one period more of one of the repeated layers. The arguments are
    those that `measure` has.

    Raises:
        ConfigError: If the plan cannot be measured.
    """
    first, repeats = _Run(plan, **how, built=built, more=0).measure()
    others = range(1, len(repeats))
    return [first, *(_Run(plan, **how, built=built, more=one).measure()[0] for one in others)]


def facts_of(plan: TrainerPlan, *, use_data: bool = False) -> tuple[Samples, bool]:
    """Return the samples of a plan, and whether its model has sequence parallelism.

    Inside `fake_world`.

    Raises:
        ConfigError: If the plan does not train, or its samples cannot be known.
    """
    _check(plan)
    return _Run(plan, use_data=use_data).facts()


def _check(plan: TrainerPlan) -> None:
    if plan.method != "fit":
        raise ConfigError(f"plan requires mode train or train_and_eval, got {plan.mode}.")
    if "train_dataloader" not in plan.call:
        raise ConfigError(
            "plan requires a configuration file that runs fit: set fit.train_dataloader."
        )


def _with_few_layers(
    plan: TrainerPlan, built: Built, elsewhere: MeasuredElsewhere | None, **how: bool
) -> Figures | None:
    """Return the figures, extrapolated from a model with few layers; None if not possible."""
    try:
        least, repeats = _Run(plan, **how, built=built).measure()
        if not repeats:
            return figures_of(least)
        longer = None if elsewhere is None else elsewhere()
        if longer is None:
            longer = measure_longer(plan, built, **how)
    except ConfigError:
        return None  # such as an optimizer with groups of certain layers; else it is raised again
    numbers = extrapolated(least.numbers, [one.numbers for one in longer], repeats)
    if least.setting.is_replicated:
        _count_messages(numbers, least.numbers)
    return figures_of(least._replace(numbers=numbers))


def _count_messages(
    numbers: dict[tuple[str, ...], float], least: Mapping[tuple[str, ...], float]
) -> None:
    """Correct the number of messages that DDP sends, which depends on their sizes alone."""
    for key in numbers:
        if key[0] == EXCHANGE and key[1] == "all-reduce" and key[-1] == "num_calls":
            size = *key[:-1], "num_bytes"
            more = num_buckets(round(numbers[size])) - num_buckets(round(least.get(size, 0)))
            numbers[key] = least.get(key, 0) + more


class _Run:
    """Two steps on fake tensors, or one.

    Args:
        plan: The plan.
        use_data: As of `measure`.
        one_step: As of `measure`.
        built: Builds the model with few repeated layers; None = with all.
        more: Index of the repeated layers that get one period more.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        *,
        use_data: bool = False,
        one_step: bool = False,
        built: Built | None = None,
        more: int | None = None,
    ) -> None:
        self._plan, self._use_data, self._one_step = plan, use_data, one_step
        self._built, self._more = built, more
        self._mode = Built().mode if built is None else built.mode
        self._repeats: list[Repeat] = []

    def measure(self) -> tuple[Measured, list[Repeat]]:
        """Return the figures, and the repeated layers, which were not all measured.

        Raises:
            ConfigError: If the plan cannot be measured.
        """
        try:
            with TemporaryDirectory() as folder:
                own, on_host = _without_side_effects(self._plan, folder)
                tracker = MemoryTracker(self._mode, on_host=on_host)
                given = own.init["model"]
                build = partial(self._build, given, tracker)
                own.init["model"] = _Model(build, getattr(given, "target", None))
                with _measured(self._mode, tracker):
                    trainer = own.build()
                trainer.interruptions.leave_signals()  # there is nothing to save
                try:
                    return self._steps(trainer, tracker), self._repeats
                finally:
                    trainer.close()
        except BackendError as error:
            raise ConfigError(str(error)) from None

    def facts(self) -> tuple[Samples, bool]:
        """Return the result of `facts_of`: what the data are may follow the model."""
        with _measured(self._mode, MemoryTracker(self._mode)):
            model = self._plan.init["model"].build()
        samples = find_samples(self._plan, model, use_data=self._use_data)
        return samples, bool(getattr(model, "sequence_plan", None))

    def _build(self, component: Any, tracker: MemoryTracker) -> Module:
        """Return the model, which is sharded next."""
        if self._built is None:
            model: Module = component.build()
        else:
            model, self._repeats = self._built.build(component)
            shorten(model, self._repeats, self._more, tracker.mark)
        tracker.mark(_PLACING)
        return model

    def _steps(self, trainer: Trainer, tracker: MemoryTracker) -> Measured:
        model, backend = trainer.compiled_model, trainer.backend
        samples = find_samples(self._plan, trainer.model, use_data=self._use_data)
        num_shards = backend.comm.data_shard[1]
        loop = trainer.loop
        assert isinstance(loop, TrainingLoop)  # made below
        with _measured(self._mode, tracker):
            tracker.label(model.parameters(), MemoryKind.PARAMETERS)
            tracker.label(model.buffers(), MemoryKind.BUFFERS)
            num_steps = 1 if self._one_step and not _is_replicated(backend) else _NUM_STEPS
            if num_steps == 1:
                _make_optimizer_state(trainer, tracker)
            tracker.mark(_TRAINING)
            local = local_batch(self._plan, samples, num_shards)
            batch = map_tensors(local.batch, self._faked)
            leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            tracker.label(leaves, MemoryKind.BATCH)
            follower = _Follower(tracker, num_steps)
            trainer.add_callback(follower)
            loop.max_steps = num_steps
            trainer.fit(Copies(batch, num_steps * loop.grad_accum_steps), ckpt_path=None)
        setting = _setting(self._plan, trainer, local)
        numbers = _Numbers(tracker, follower, setting, local).all_of(trainer)
        return Measured(setting, numbers)

    def _faked(self, tensor: Tensor) -> Tensor:
        is_fake = getattr(tensor, "fake_mode", None) is not None
        return tensor if is_fake else self._mode.from_tensor(tensor)


class _Model:
    """A component that is built by a function; `target`: its class."""

    def __init__(self, build: Callable[[], Module], target: Any) -> None:
        self.build = build
        self.target = target


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
    num = len(repeated(_num_accumulated(plan)))
    own.init["loop"] = TrainingLoop(max_steps=_NUM_STEPS, grad_accum_steps=num, eval_frequency=None)
    return own, on_host


@contextmanager
def _measured(mode: FakeTensorMode, tracker: MemoryTracker) -> Iterator[None]:
    """Make all tensors fake, and track them."""
    with mode, tracker, tracker.following_sizes(), _without_hints():
        yield


@contextmanager
def _without_hints() -> Iterator[None]:
    """Hide hints that are about the two steps, or about messages that nobody sends."""
    logs = [logging.getLogger(name) for name in _HINTS]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, was_disabled in zip(logs, before, strict=True):
            log.disabled = was_disabled


def _is_replicated(backend: Any) -> bool:
    """Return whether several processes have all parameters; DDP makes buckets in a first step."""
    return backend.comm.world_size > 1 and not backend.has_shards


def _make_optimizer_state(trainer: Trainer, tracker: MemoryTracker) -> None:
    """Make the state that optimizers have after the first step, which is not measured."""
    tracker.mark(_UPDATING)
    for optimizer in trainer.optimizers.values():
        for param in trainer.compiled_model.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        optimizer.step()
        _label_state(optimizer, tracker)
        optimizer.zero_grad()
    trainer.compiled_model.zero_grad()


def _label_state(optimizer: Optimizer, tracker: MemoryTracker) -> None:
    state = tree_leaves(list(optimizer.state.values()))
    tracker.label((one for one in state if isinstance(one, Tensor)), MemoryKind.OPTIMIZER)


def _setting(plan: TrainerPlan, trainer: Trainer, local: LocalBatch) -> Setting:
    backend = trainer.backend
    axes = getattr(backend, "sizes", None)
    return Setting(
        world_size=backend.comm.world_size,
        axes={} if axes is None else {name: getattr(axes, name) for name in _AXES},
        device=str(plan.init.get("device") or "cpu"),
        num_data_shards=backend.comm.data_shard[1],
        batch_size=local.micro_batch_size,
        num_batches=local.num_parts * _num_accumulated(plan),
        num_samples=local.num_samples * _num_accumulated(plan),
    )


def _num_accumulated(plan: TrainerPlan) -> int:
    loop = plan.init.get("loop")
    num: int = 1 if loop is None else loop.arguments.get("grad_accum_steps", 1)
    return num


class _Numbers:
    """The figures of a run that are linear in the number of layers."""

    def __init__(
        self, tracker: MemoryTracker, follower: _Follower, setting: Setting, local: LocalBatch
    ) -> None:
        self._tracker, self._follower = tracker, follower
        self._setting, self._missing = setting, local.missing_bytes
        num = setting.num_batches // local.num_parts
        self._weights = local.weights(num)

    def all_of(self, trainer: Trainer) -> dict[tuple[str, ...], float]:
        """Return all figures by name."""
        model = trainer.model
        num_params, num_here = sizes_of(model.parameters())
        states = [model.state_dict()]
        states += [one.state_dict()["state"] for one in trainer.optimizers.values()]
        saved, saved_here = checkpoint_sizes(states, self._setting.world_size)
        found: dict[tuple[str, ...], float] = {
            ("params",): num_params,
            ("params here",): num_here,
            ("checkpoint",): saved,
            ("checkpoint here",): saved_here,
        }
        return found | self._memory() | self._counts()

    def _memory(self) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for phase, peak in self._tracker.peaks().items():
            if phase == _UPDATING:  # no run has it
                continue
            when = "building" if phase in _BUILDING else "training"
            more = self._missing if when == "training" else 0
            for kind in MemoryKind:
                extra = more if kind is MemoryKind.BATCH else 0
                found[when, phase, "parts", kind] = peak.parts[kind] + extra
                found[when, phase, "highest", kind] = peak.highest[kind] + extra
        return found

    def _counts(self) -> dict[tuple[str, ...], float]:
        found: Counter[tuple[str, ...]] = Counter()
        counts = self._follower.counts
        for counted, weight in zip(counts, self._weights, strict=True):
            for key, value in counted.items():
                found[key] += value * weight
        return dict(found)


class _Follower(Callback):
    """Label memory for the tracker, and mark the phases of a step and where batches end."""

    def __init__(self, tracker: MemoryTracker, num_steps: int) -> None:
        self._tracker = tracker
        self._last_step = num_steps - 1
        self._num_steps = self._num_batches = 0
        self.counts: list[dict[tuple[str, ...], int]] = []  # of the micro-batches of the last step

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Module, batch: Batch, batch_idx: int
    ) -> None:
        self._num_batches += 1
        self._tracker.stage = f"{self._num_batches} "
        self._tracker.mark(_TRAINING)
        if self._num_batches == 1:
            self._tracker.clear_counts()  # of the start of the run

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if self._num_steps == self._last_step:
            self.counts.append(self._tracker.counts())
        self._tracker.clear_counts()

    @override
    def on_before_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        self._tracker.stage = f"{self._num_batches} backward: "  # layers may be called again
        self._tracker.mark("begin")

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        self._tracker.finish_exchange()
        params = trainer.compiled_model.parameters()
        grads = [param.grad for param in params if param.grad is not None]
        self._tracker.label(grads, MemoryKind.GRADIENTS)
        self._tracker.mark("end")

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        _label_state(optimizer, self._tracker)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self._num_steps += 1
