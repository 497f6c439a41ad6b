"""Backends for several ranks, each with its own device: a layer over those for one device.

Uses torch.distributed: DistributedDataParallel, `fully_shard` (FSDP2) and tensor parallelism, on
a device mesh with the dimensions `replicate`, `shard` and `tensor`. Rows of data are split over
ranks along `context`, which the model does itself, see `ContextParallel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adafactor, Optimizer
from typing_extensions import override

from ..backend import Backend, overridden
from ..conditional_step import skip_step
from ..coordination.world import join
from ..errors import BackendError
from ..loss_window import LossWindow
from ..placement import map_tensors
from .apply import accumulating, make_mesh, make_mesh_of_rows, parallelize
from .comm import DistributedComm
from .config import TIMEOUT_S, ParallelSettings, check_timeout
from .context import split_rows
from .ddp import GradientWindow, LossWeighting, ReducedWindow
from .fsdp import distribute, free_gathered, is_sharded, whole
from .norms import ShardedNorms

_WHOLE: Final = frozenset({"Muon", "Rprop"})
_SHARDED_SCALING: Final = "the loss scaler does not support sharded parameters"


class ParallelBackend(Backend):
    """What differs with several ranks.

    Every rank has its own data shard, except that ranks along `context` and `tensor` share one.

    Args:
        parallel: Sizes of the mesh: `replicate`, `shard`, `context`, `tensor`; -1 = the remaining
            ranks. None = replicate over all.
        sharding: Options for sharding, see `ParallelSettings`.
        tensor_plan: How modules are split along `tensor`, by patterns of their names; None = the
            model's `tensor_plan`.
        sequence_parallel: Whether the states between the layers that `tensor` splits are split by
            positions: norms, dropout and residual additions compute on a part of the positions.
        find_unused_parameters: Whether some steps leave parameters without a gradient; costs a
            graph traversal per step. For replicated models.
        timeout: Timeout of collectives in seconds, > 0.
        **options: Options of the backend for one device.

    Raises:
        BackendError: If an option is invalid; in `open`, if the mesh does not match the world size.
    """

    comm: DistributedComm
    _never_called: ClassVar = {
        "_make_comm": "several processes communicate over torch.distributed. Remove it, or run one "
        "process",
        "_place_model": "several processes distribute the model. Override prepare_model",
    }

    def __init__(
        self,
        *,
        parallel: Mapping[str, Any] | None = None,
        sharding: Mapping[str, Any] | None = None,
        tensor_plan: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
        find_unused_parameters: bool = False,
        timeout: float = TIMEOUT_S,
        **options: Any,
    ) -> None:
        self.settings = ParallelSettings.from_options(
            {
                "parallel": parallel,
                "sharding": sharding,
                "tensor_plan": tensor_plan,
                "sequence_parallel": sequence_parallel,
                "find_unused_parameters": find_unused_parameters,
            }
        )
        self.timeout_s = check_timeout(timeout)
        self._model: Module | None = None
        self._autocast: torch.dtype | None = None
        self._weighted: GradientWindow | None = None
        self._replica: DistributedDataParallel | None = None
        self._averaged: dict[int, Tensor] = {}
        """Parameters whose gradients the replica averages, or that are not of the model, by id."""
        self._accumulating: Callable[[], AbstractContextManager[Any]] | None = None
        super().__init__(**options)
        self.initial_values.can_wait = self.settings.meta_init is not False

    # ---- life

    @override
    def _make_comm(self) -> DistributedComm:
        return DistributedComm()

    @override
    def open(self) -> None:
        self._before_start()  # `join` may start the device's runtime
        world = join()
        if world is None:
            raise BackendError(
                "Not a distributed run: this process was not started by torchrun. Start the "
                "program with torchrun."
            )
        super().open()
        world.timeout_s = self.timeout_s
        self.comm.connect(world)
        self.sizes = self.settings.sizes(world.world_size)
        self.mesh = make_mesh(self.sizes, self.device.type)
        self._rows = make_mesh_of_rows(self.sizes, self.device.type)
        own = self.sizes.of_parameters
        self.has_shards = own.shard * own.tensor > 1
        self.comm.divide(self.sizes, self.mesh, self._rows)
        refused = dict(self.caps.refused_dtypes)
        if self.has_shards:
            self._check_norms()
            self.norms = ShardedNorms(self)
            refused |= dict.fromkeys(self.caps.needs_scaler, _SHARDED_SCALING)
        without_float8 = own.tensor > 1 and "float8 does not work with tensor parallelism"
        self.caps = dataclasses.replace(
            self.caps,
            no_float8=without_float8 or self.caps.no_float8,
            collectives=True,
            sharded_state=self.has_shards,
            refused_dtypes=refused,
        )

    def _check_norms(self) -> None:
        """Raise a `BackendError` if the backend for one device has its own norms."""
        if overridden(type(self), ParallelBackend, ("_make_norms",)):
            raise BackendError(
                f"{type(self).__name__}._make_norms: backend.parallel shards the parameters, "
                f"which requires other norms. Remove the method, or set only "
                f"backend.parallel.replicate."
            )

    # ---- model and optimizer

    @override
    def building(self) -> AbstractContextManager[Any]:
        building = super().building()
        return (
            _both(building, self.initial_values.left_out()) if self.settings.meta_init else building
        )

    @override
    def _place_model(self, model: Module) -> Module:
        if self._rows is not None:
            split_rows(model, self._rows)
        self._checkpoint_activations(model)
        if not self.has_shards:
            self.initial_values.draw(model, self.device)
        is_copied = not (self.has_shards or self.settings.find_unused_parameters)
        # The search for unused parameters starts at the outputs and would not find the weights.
        is_weighted = is_copied and not overridden(type(self), ParallelBackend, ("backward",))
        weighting = LossWeighting(model) if is_weighted and LossWeighting.fits(model) else None
        settings = self.settings
        if self.sizes.of_parameters.shard > 1:
            settings = settings.with_dtypes(self._autocast, model)
        module = parallelize(
            weighting or model,
            settings,
            self.sizes,
            self.mesh,
            self.device,
            self._compile,
            partial(self.initial_values.draw, device=self.device),
        )
        self._weighted = None if weighting is None else GradientWindow(weighting)
        self.window = self._weighted or self._make_window()
        self._model = model
        if isinstance(module, DistributedDataParallel):
            self._replica = module
            self._averaged = {
                id(param): param for param in model.parameters() if param.requires_grad
            }
        if not (self.has_shards and self.settings.accumulate_shards):
            self._accumulating = partial(accumulating, module, model)
        return module

    @override
    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Reject an optimizer whose update depends on full parameters."""
        kind = type(optimizer)
        if self.has_shards and (kind.__name__ in _WHOLE or kind is Adafactor):
            raise BackendError(
                f"optimizer: {kind.__name__} requires whole parameters, but backend.parallel "
                f"shards them. Use another optimizer, such as AdamW, or set only "
                f"backend.parallel.replicate."
            )
        return super().prepare_optimizer(optimizer)

    @override
    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        self._autocast = dtype
        return super().autocast(dtype)

    @override
    def accumulating(self) -> AbstractContextManager[Any]:
        inner = super().accumulating()
        if self._accumulating is None:
            return inner
        outer = self._accumulating()
        return outer if inner is self._nothing else _both(outer, inner)

    @override
    def zero_grad(self, optimizer: Optimizer) -> None:
        super().zero_grad(optimizer)
        self.comm.has_stepped = True

    @override
    def inference(self) -> AbstractContextManager[Any]:
        return self._inference() if self.has_shards else super().inference()

    @contextmanager
    def _inference(self) -> Iterator[None]:
        with super().inference():
            try:
                yield
            finally:
                if self._model is not None:
                    free_gathered(self._model)

    def _make_window(self) -> LossWindow:
        dtype = torch.float64 if self.caps.float64 else torch.float32
        return ReducedWindow(self.comm, self.device, dtype)

    @override
    def backward(self, loss: Tensor) -> None:
        if self._weighted is None:
            super().backward(loss)
        else:
            self._weighted.backward(loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        if self._replica is not None and self._replica.require_backward_grad_sync:
            self._check_averaged(optimizer)
        if not self.has_shards or keep is None:
            super().optimizer_step(optimizer, keep)
        elif self._look(keep):  # undoing a step on the device supports only full tensors
            super().optimizer_step(optimizer)
        else:
            skip_step(optimizer)

    def _check_averaged(self, optimizer: Optimizer) -> None:
        """Check that no gradient is only this rank's.

        Raises:
            BackendError: If a parameter of the model was added, replaced or unfrozen after the
                model was distributed.
        """
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and id(param) not in self._averaged:
                    self._add_averaged(param)

    def _add_averaged(self, param: Tensor) -> None:
        named = () if self._model is None else self._model.named_parameters()
        name = next((name for name, one in named if one is param), None)
        if name is not None:
            raise BackendError(
                f"The gradient of {name} is not averaged over the ranks, which would get different "
                f"weights: it was added, replaced or unfrozen after the model was distributed with "
                f"backend.parallel.replicate. Do so before the Trainer is created, or use "
                f"backend.parallel: {{shard: -1}}."
            )
        self._averaged[id(param)] = param

    # ---- state

    @override
    def host_state(self, tree: Any) -> Any:
        on_host = super().host_state  # one tensor after another: all of them may not fit
        return map_tensors(tree, lambda tensor: on_host(whole(tensor)))

    @override
    def for_loading(self, tree: Any, like: Mapping[str, Any] | None = None) -> Any:
        """Return the tree with tensors sharded like the run's; every rank passes full tensors."""
        tree = super().for_loading(tree, like)
        if not self.has_shards or like is None:
            return tree
        return {
            name: distribute(value, like[name])
            if isinstance(value, Tensor) and not is_sharded(value) and is_sharded(like.get(name))
            else value
            for name, value in tree.items()
        }

    @override
    def explain(self, error: BaseException) -> None:
        super().explain(error)
        if self.comm.is_connected:
            self.comm.world.fail_by(error)  # at once: unwinding may wait for others
        if "Expected to have finished reduction" in str(error):
            error.add_note(
                "A step left parameters without a gradient. Set backend.find_unused_parameters: "
                "true, or remove those parameters from the model."
            )


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
