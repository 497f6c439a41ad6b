"""Training of selected weights within a parameter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.callbacks.parts.activation_hooks import named_params
from modelzoo_trainer.core.parts.structure import ModelStructure
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.selective_grad")

_KEYS: Final = ("param_filter", "init_method")
_OUTLIER_THRESHOLD: Final = 2.25  # standard deviations, as Cerebras' "outlier" has it


def outlier_mask(param: Tensor) -> Tensor:
    """Return which weights are large: at least 2.25 standard deviations of their column.

    The standard deviation is taken over the absolute values along the first dimension. A parameter
    with a single row has no large weights.

    Shapes:
        Returns: as `param`, bool, on its device.
    """
    if param.dim() == 0 or param.shape[0] < 2:
        return torch.zeros_like(param, dtype=torch.bool)
    size = param.detach().abs()
    return size >= _OUTLIER_THRESHOLD * size.std(dim=0, keepdim=True)


_METHODS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"outlier": outlier_mask}


class SelectiveGrad(Callback):
    """Train only selected weights of some parameters; the others stay unchanged, bit by bit.

    The weights are selected when the first fit starts, from their values at that time. If a
    parameter is added or unfrozen later, its weights are selected before its first step. The
    gradients of the other weights are zeroed before clipping, and any remaining update of the
    optimizer, such as weight decay, is undone. Parameters that match no entry train as usual.

    Args:
        selective_grads: One or more entries: mappings with `param_filter`, one or more parameter
            names or patterns with `*`, `?` and `[...]` (default: all), and `init_method`, how to
            select weights: "outlier" = those with an absolute value of at least 2.25 standard
            deviations of the absolute values along the first dimension. The first entry that
            matches a parameter applies.

    State: Which weights are trained.

    Raises:
        ConfigError: If an entry is invalid; at setup, if the state is sharded or a filter matches
            no parameter.

    Cost: In each step, a copy of the matching parameters.
    """

    def __init__(self, selective_grads: dict[str, Any] | list[dict[str, Any]]) -> None:
        entries = [selective_grads] if isinstance(selective_grads, Mapping) else selective_grads
        if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
            raise ConfigError(
                f"SelectiveGrad.selective_grads must be a dict with {' and '.join(_KEYS)}, or a "
                f"list of such dicts; got {selective_grads!r}."
            )
        self._entries = [_entry(entry) for entry in entries]
        self._masks: dict[str, Tensor] = {}
        self._structure: ModelStructure | None = None
        self._params: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Tensor] = []

    # ---- selecting

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.backend.caps.sharded_state:
            raise ConfigError(
                "SelectiveGrad does not work with sharded parameters (backend.parallel.shard or "
                "tensor). Set backend.parallel to {replicate: -1}, or remove the callback."
            )
        names = list(named_params(trainer.model))
        for filters, _ in self._entries:
            for pattern in filters:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"SelectiveGrad.param_filter: {pattern!r} matches no parameter. "
                        f"{suggest(pattern, names)}"
                    )

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._select(trainer.model, of_checkpoint=bool(self._masks))
        log.info("SelectiveGrad: partially trained parameters: %d.", len(self._params))

    def _select(self, model: Module, *, of_checkpoint: bool = False) -> None:
        """Look up the parameters, and select weights of the new ones.

        `of_checkpoint`: there may be no new ones.
        """
        params = {name: p for name, p in named_params(model).items() if p.requires_grad}
        self._params = []
        for name, param in params.items():
            method = self._method_for(name)
            if method is None:
                continue
            mask = self._masks.get(name)
            if mask is None and not of_checkpoint:
                mask = _METHODS[method](param)
            if mask is None or mask.shape != param.shape:
                raise ConfigError(
                    f"SelectiveGrad: {'the checkpoint' if of_checkpoint else 'this run'} has no "
                    f"mask of shape {tuple(param.shape)} for {name!r}. Resume with the model and "
                    f"the param_filter that the run started with, and keep the shapes."
                )
            self._masks[name] = mask.to(param.device)
            self._params.append((param, self._masks[name]))
        self._structure = ModelStructure(model)

    def _method_for(self, name: str) -> str | None:
        for filters, method in self._entries:
            if any(fnmatchcase(name, pattern) for pattern in filters):
                return method
        return None

    # ---- the step

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._structure is None or not self._structure.is_current():
            self._select(model)
        self._kept = [param.detach().clone() for param, _ in self._params]
        for param, mask in self._params:
            if param.grad is not None:
                _keep_where(mask, param.grad)

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        kept, self._kept = self._kept, []
        with torch.no_grad():
            for (param, mask), before in zip(self._params, kept, strict=True):
                param.copy_(torch.where(mask, param, before))

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return which weights are trained, by parameter name."""
        return {"masks": dict(self._masks)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore which weights are trained."""
        self._masks = dict(state_dict["masks"])


def _keep_where(mask: Tensor, grad: Tensor) -> None:
    """Zero a gradient where a mask is False; a sparse one need not be coalesced."""
    if grad.is_sparse:
        values, mask = grad._values(), mask[tuple(grad._indices())]
    else:
        values = grad
    # Not a product: a non-finite value times 0 is not 0.
    values.masked_fill_(mask.logical_not(), 0)


def _entry(entry: Any) -> tuple[list[str], str]:
    """Return the filters and the method of an entry, validated."""
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"SelectiveGrad.selective_grads: each entry must be a dict with "
            f"{' and '.join(_KEYS)}, got {entry!r}."
        )
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(
                f"SelectiveGrad.selective_grads: {key!r} is not a valid key. {suggest(key, _KEYS)}"
            )
    given = entry.get("param_filter", "*")
    filters = [given] if isinstance(given, str) else given
    is_list = isinstance(filters, (list, tuple))
    if not is_list or not filters or not all(isinstance(each, str) for each in filters):
        raise ConfigError(
            f"SelectiveGrad.param_filter is {given!r}; it must be a parameter name or a pattern "
            f"such as '*.bias', or a list of these."
        )
    method = entry.get("init_method", "outlier")
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(
            f"SelectiveGrad.init_method is {method!r}. {suggest(str(method), _METHODS)}"
        )
    return list(filters), method
