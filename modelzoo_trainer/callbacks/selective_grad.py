"""Training of some of the weights of a parameter."""

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
from modelzoo_trainer.callbacks.activation_hooks import named_params
from modelzoo_trainer.errors import ConfigError, suggest

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.selective_grad")

_KEYS: Final = ("param_filter", "init_method")
_OUTLIER_THRESHOLD: Final = 2.25  # standard deviations, as Cerebras' "outlier" has it


def outlier_mask(param: Tensor) -> Tensor:
    """Return which weights are large: at least 2.25 standard deviations of their column.

    The standard deviation is that of the absolute values along the first dimension. A parameter
    that has only one row has none.

    Shapes:
        Returns: as `param`, bool, on its device.
    """
    if param.dim() == 0 or param.shape[0] < 2:
        return torch.zeros_like(param, dtype=torch.bool)
    size = param.detach().abs()
    return size >= _OUTLIER_THRESHOLD * size.std(dim=0, keepdim=True)


_METHODS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"outlier": outlier_mask}


class SelectiveGrad(Callback):
    """Trains only some weights of chosen parameters; the others stay as they are, bit by bit.

    Which ones is decided when the first fit starts, from the weights as they are then, and stays.
    The gradients of the others are zero before clipping, and what the optimizer does to them all
    the same, such as weight decay, is undone. Parameters that are not chosen train as usual.

    Args:
        selective_grads: What to choose, or a list of such: a mapping with `param_filter`, a name of
            parameters or a pattern with `*`, `?` and `[...]`, or several (left out = all); and
            `init_method`, how weights are chosen: "outlier" = those whose size is at least 2.25
            standard deviations of the sizes along the first dimension. The first entry that fits a
            parameter counts.

    State: Which weights train.

    Raises:
        ConfigError: If an entry does not fit; at set-up, if the state is sharded or a filter fits
            no parameter.

    Cost: In each step, a copy of the chosen parameters.
    """

    def __init__(self, selective_grads: dict[str, Any] | list[dict[str, Any]]) -> None:
        entries = [selective_grads] if isinstance(selective_grads, Mapping) else selective_grads
        if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
            raise ConfigError(
                f"SelectiveGrad.selective_grads is {selective_grads!r}; it must be a mapping with "
                f"{' and '.join(_KEYS)}, or a list of such."
            )
        self._entries = [_entry(entry) for entry in entries]
        self._masks: dict[str, Tensor] = {}
        self._params: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Tensor] = []

    # ---- which weights

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.backend.caps.sharded_state:
            raise ConfigError(
                "SelectiveGrad chooses among the weights of whole parameters, and each process "
                "has only a part of them. Run it without sharding."
            )
        names = list(named_params(trainer.model))
        for filters, _ in self._entries:
            for pattern in filters:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"SelectiveGrad.param_filter: {pattern!r} fits no parameter. "
                        f"{suggest(pattern, names)}"
                    )

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        params = {name: p for name, p in named_params(trainer.model).items() if p.requires_grad}
        chosen = {name: method for name in params if (method := self._method_for(name))}
        if not self._masks:
            self._masks = {name: _METHODS[how](params[name]) for name, how in chosen.items()}
        self._params = []
        for name in chosen:
            mask = self._masks.get(name)
            if mask is None or mask.shape != params[name].shape:
                raise ConfigError(
                    f"SelectiveGrad: the checkpoint does not say which weights of {name!r} "
                    f"{tuple(params[name].shape)} train. Go on with the param_filter that the run "
                    f"began with."
                )
            self._masks[name] = mask.to(params[name].device)
            self._params.append((params[name], self._masks[name]))
        log.info("%d parameters train in part.", len(self._params))

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
        """Return which weights train, by the names of their parameters."""
        return {"masks": dict(self._masks)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with these."""
        self._masks = dict(state_dict["masks"])


def _keep_where(mask: Tensor, grad: Tensor) -> None:
    """Set to 0 what a mask leaves out of a gradient; one that is sparse need not be coalesced."""
    if grad.is_sparse:
        values, mask = grad._values(), mask[tuple(grad._indices())]
    else:
        values = grad
    # Not a product: what is not finite times 0 is not 0.
    values.masked_fill_(mask.logical_not(), 0)


def _entry(entry: Any) -> tuple[list[str], str]:
    """Return the filters and the method of an entry, checked."""
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"SelectiveGrad.selective_grads has {entry!r}; it must be a mapping with "
            f"{' and '.join(_KEYS)}."
        )
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(
                f"SelectiveGrad.selective_grads: {key!r} is no key of it. {suggest(key, _KEYS)}"
            )
    given = entry.get("param_filter", "*")
    filters = [given] if isinstance(given, str) else given
    is_list = isinstance(filters, (list, tuple))
    if not is_list or not filters or not all(isinstance(each, str) for each in filters):
        raise ConfigError(
            f"SelectiveGrad.param_filter is {given!r}; it must be a name of parameters, or several."
        )
    method = entry.get("init_method", "outlier")
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(
            f"SelectiveGrad.init_method is {method!r}. {suggest(str(method), _METHODS)}"
        )
    return list(filters), method
