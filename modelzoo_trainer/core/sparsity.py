"""Sparse training: masks of weights, gradients and optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.checkpointing.state_json import bare_names
from modelzoo_trainer.core.parts.structure import ModelStructure
from modelzoo_trainer.errors import (
    OF_ANOTHER_RUN,
    ONLY_MODEL,
    WHAT_FITS,
    CheckpointMismatch,
    ConfigError,
)
from modelzoo_trainer.optim.sparsity import (
    SparseParam,
    algorithms_of,
    prune_gradients,
    prune_state,
    prune_weights,
    select,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.sparsity")

_KEY: Final = "sparsity"


class Sparsity(CoreCallback):
    """Keep weights at exactly zero, with masks that algorithms update.

    Masks are created at set-up. Updates depend only on the step number, and compute new masks
    before the optimizer step, from the whole weights and gradients, also if they are sharded.
    Gradients are masked before each optimizer step, before clipping, and weights after it; the
    optimizer state is masked when masks change. An update also applies if the optimizer step is
    skipped (`CheckLoss`, a loss scaler), unless it requires gradients and these are non-finite.

    Args:
        sparsity: A fraction, a mapping as in a configuration file, a list of these, an algorithm,
            or a callable that returns one of these; None = train all weights.

    State: `sparsity`, the masks by parameter name: true where a weight is trained; and the
        settings as text, to warn if a resumed run has others, which it uses.

    Cost: None without sparsity. Otherwise one byte per weight, and one read of gradients and
        weights per step; an update sorts. Of sharded weights, the first masks and updates gather
        one parameter at a time. No host read.

    Raises:
        ConfigError: If it is none of these; at set-up, if a filter matches no parameter, or two
            algorithms match the same one.
    """

    def __init__(self, sparsity: Any = None) -> None:
        self.algorithms = algorithms_of(sparsity)
        self.params: list[SparseParam] = []
        self._structure: ModelStructure | None = None
        self._has_reported_all = False
        self.reads_weights_early = bool(self.algorithms)
        if not self.algorithms:
            self.idle_hooks = frozenset(
                {
                    "setup",
                    "on_train_start",
                    "on_before_optimizer_step",
                    "on_after_optimizer_step",
                    "on_save_checkpoint",
                }
            )

    @override
    def setup(self, trainer: Trainer) -> None:
        named = _named(trainer.model)
        owners: dict[str, int] = {}
        for idx, algorithm in enumerate(self.algorithms):
            where = f"sparsity: {type(algorithm).__name__}.param_filter"
            for name, param in select(trainer.model, named, algorithm.param_filter, where).items():
                if name in owners:
                    raise ConfigError(
                        f"{where}: {name!r} is matched by both entry {owners[name]} and entry "
                        f"{idx} of the list. Change a param_filter so that only one matches."
                    )
                owners[name] = idx
                one = SparseParam.of(name, param, algorithm, trainer.backend.comm)
                self.params.append(one)
        self._begin(trainer, 0)

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        self._find(model)

    def _find(self, model: Module) -> None:
        """Look up the parameters, which may have been replaced, and zero their masked weights."""
        named = _named(model)
        for one in self.params:
            param = named.get(one.name)
            if param is None or param.shape != one.pruned.shape:
                raise ConfigError(
                    f"sparsity: {one.name!r} was replaced after setup by a parameter of another "
                    f"name or shape. Replace parameters before creating the Trainer."
                )
            one.param = param
        prune_weights(self.params)
        self._structure = ModelStructure(model)

    # ---- the step

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._structure is None or not self._structure.is_current():
            self._find(model)
        step = trainer.global_step
        due = {id(algorithm) for algorithm in self.algorithms if algorithm.is_due(step)}
        if due:
            self._update(trainer, [one for one in self.params if id(one.algorithm) in due], step)
        prune_gradients(self.params)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        prune_weights(self.params)

    def _update(self, trainer: Trainer, due: list[SparseParam], step: int) -> None:
        self._warn_of_all(due, step)
        numbers = _numbers(trainer, due, step)
        found, flags = [], []
        for idx, one in enumerate(due):
            gradient = one.gradient()
            found.append(one.next_pruned(numbers[idx], gradient))
            if gradient is not None:
                flags.append(gradient.isfinite().all())
        is_finite = torch.stack(flags).all() if flags else None
        for one, pruned in zip(due, found, strict=True):
            own = one.own_pruned()
            if one.algorithm.needs_gradients and is_finite is not None:
                pruned = torch.where(is_finite, pruned, own)
            own.copy_(pruned)
        prune_weights(due)
        for optimizer in trainer.optimizers.values():
            prune_state(due, optimizer)

    def _warn_of_all(self, due: list[SparseParam], step: int) -> None:
        """Warn once about a schedule that sets all weights to zero."""
        if self._has_reported_all:
            return
        name = next((one.name for one in due if one.algorithm.fraction_at(step) >= 1), None)
        if name is not None:
            self._has_reported_all = True
            log.warning("sparsity: at global_step %d all weights of %r become zero.", step, name)

    def _begin(self, trainer: Trainer, step: int) -> None:
        """Create the masks for the start of a step."""
        numbers = _numbers(trainer, self.params, step - 1)
        for idx, one in enumerate(self.params):
            one.own_pruned().copy_(one.first_pruned(numbers[idx]))
        self._apply(trainer)

    def _apply(self, trainer: Trainer) -> None:
        prune_weights(self.params)
        for optimizer in trainer.optimizers.values():
            prune_state(self.params, optimizer)

    # ---- facts

    def fractions(self, step: int) -> dict[str, tuple[float, Tensor]]:
        """Return the target and the actual fraction of zeros of each parameter.

        Collective with sharded parameters. `step`: the `global_step` before the optimizer step.

        Shapes:
            The second: (), float32, on the device.
        """
        return {
            one.name: (
                one.algorithm.fraction_at(step),
                one.comm.whole(one.pruned.sum()).to(torch.float32) / one.pruned.numel(),
            )
            for one in self.params
        }

    # ---- checkpoints

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        masks = {one.name: one.pruned.logical_not() for one in self.params}
        state = trainer.backend.state_view({"masks": masks})
        state_dict[_KEY] = {**state, "settings": self._settings()}

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        found = state_dict.get(_KEY)
        masks = found.get("masks") if isinstance(found, Mapping) else None
        if not self.params:
            if masks and trainer.is_resuming:
                log.warning(
                    "The checkpoint has sparsity masks, but this run has no sparsity: training "
                    "all weights."
                )
            return
        if not isinstance(found, Mapping) or not isinstance(masks, Mapping):
            self._start_without(trainer, state_dict)
            return
        self._take(trainer, masks, state_dict.get("global_step", 0))
        if trainer.is_resuming:
            _warn_of_others(found.get("settings"), self._settings())

    def _take(self, trainer: Trainer, masks: Mapping[str, Tensor], step: int) -> None:
        """Use the masks of a checkpoint for the start of a step."""
        if not trainer.checkpoint.disable_strict_checkpoint_loading:
            _check(self.params, masks)
        elif any(not _fits(one, masks) for one in self.params):
            self._begin(trainer, step)
        found = {one.name: masks[one.name] for one in self.params if _fits(one, masks)}
        found = trainer.backend.for_loading(found, {one.name: one.pruned for one in self.params})
        for one in self.params:
            if one.name in found:
                own = trainer.backend.comm.local_part(found[one.name])
                one.own_pruned().copy_(own.to(torch.bool).logical_not())
        self._apply(trainer)

    def _settings(self) -> dict[str, str]:
        return {one.name: one.algorithm.described() for one in self.params}

    def _start_without(self, trainer: Trainer, state_dict: StateDict) -> None:
        """Start from weights without masks; a validation leaves them unchanged."""
        if not trainer.is_resuming or "model" not in state_dict:
            return
        is_strict = not trainer.checkpoint.disable_strict_checkpoint_loading
        if is_strict and "global_step" in state_dict:
            raise CheckpointMismatch(
                f"The checkpoint has no masks, but this run has sparsity. {OF_ANOTHER_RUN} "
                f"{ONLY_MODEL} {WHAT_FITS}"
            )
        log.warning("The checkpoint has no sparsity masks: creating them from its weights.")
        self._begin(trainer, state_dict.get("global_step", 0))


def _named(model: Module) -> dict[str, Tensor]:
    """Return a model's parameters by the names that they have in the bare model."""
    params = dict(model.named_parameters())
    return {bare: params[name] for bare, name in bare_names(params).items()}


def _numbers(trainer: Trainer, params: list[SparseParam], step: int) -> Tensor:
    """Return what masks are computed from, (parameters, 4), int64, in one transfer."""
    seed = trainer.backend.seed
    numbers = torch.tensor([one.numbers(step, seed) for one in params], dtype=torch.int64)
    return numbers.to(trainer.backend.device, non_blocking=True)


def _warn_of_others(saved: Any, given: dict[str, str]) -> None:
    """Warn if the settings differ from the settings of the saved masks."""
    known = saved if isinstance(saved, Mapping) else {}
    others = [name for name in given if known.get(name, given[name]) != given[name]]
    if others:
        rest = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        log.warning(
            "sparsity: the settings have changed, and the saved masks of %r%s continue with the "
            "new ones. Checkpoint: %s. Now: %s.",
            others[0],
            rest,
            known[others[0]],
            given[others[0]],
        )


def _fits(one: SparseParam, masks: Any) -> bool:
    return one.name in masks and masks[one.name].shape == one.pruned.shape


def _check(params: list[SparseParam], masks: Any) -> None:
    """Check the masks of a checkpoint against this run's masks."""
    own = {one.name for one in params}
    rows = [f"  missing      {one.name}" for one in params if one.name not in masks]
    rows += [f"  unexpected   {name}" for name in masks if name not in own]
    rows += [
        f"  other shape  {one.name}"
        for one in params
        if one.name in masks and not _fits(one, masks)
    ]
    if rows:
        raise CheckpointMismatch(
            "The masks in the checkpoint do not fit this run's sparsity:\n"
            + "\n".join(rows)
            + f"\nUse the original param_filter. {OF_ANOTHER_RUN} {WHAT_FITS}"
        )
