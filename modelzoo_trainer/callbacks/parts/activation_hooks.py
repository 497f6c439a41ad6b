"""Named module outputs and their gradients in the forward and backward pass of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Loader, Outputs
from modelzoo_trainer.checkpointing.state_json import bare_names, uncompiled

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

AfterForward = Callable[[str, Module, tuple[Any, ...], dict[str, Any], Any], None]


class TensorPath(NamedTuple):
    """Identifies a tensor of a module."""

    call: str
    """The module, with the number of the call if it is not the first."""
    kind: Literal["fwd", "bwd"]
    path: str
    """Its path in the output, such as `.loss`."""

    @property
    def key(self) -> str:
        """Name of the tensor."""
        return f"{self.call}.{self.kind}{self.path}"


class ActivationHooks:
    """Call a function after the forward pass of each module, between `begin` and `end`.

    Hooks are registered only in between: a batch that is not watched costs nothing, and what
    activation checkpointing recomputes is not seen twice. Compiled modules run eagerly in a watched
    batch, since a compiled graph has no modules.
    """

    def __init__(self, model: Module, after_forward: AfterForward) -> None:
        self._model = model
        self._after_forward = after_forward
        self._open = ExitStack()

    def begin(self) -> None:
        """Register the hooks."""
        self.end()
        is_compiled = False
        for name, module in named_modules(self._model):
            hook = partial(self._after_forward, name)
            handle = module.register_forward_hook(hook, with_kwargs=True)
            self._open.callback(handle.remove)
            is_compiled = is_compiled or module._compiled_call_impl is not None
        if is_compiled or any(map(_is_wrapper, self._model.modules())):
            self._open.enter_context(torch.compiler.set_stance("force_eager"))

    def end(self) -> None:
        """Remove the hooks. Idempotent."""
        self._open.close()


class TensorWatcher(Callback, ABC):
    """Base class of callbacks that inspect the tensors of a step.

    The output of a module is `<module>.fwd`, from its second call in a batch
    `<module>.call1.fwd`; an item of a mapping or a sequence has its key appended. The model itself
    is named after its class. The gradient with respect to an output ends with `.bwd` instead. A
    module with several names has the first one.
    """

    needs_one_optimizer = True  # it begins with `forward`

    watches_validation = True
    """Whether to watch validation batches."""

    def __init__(self) -> None:
        self._hooks: ActivationHooks | None = None
        self._num_calls: Counter[str] = Counter()

    @abstractmethod
    def is_watched(self, trainer: Trainer) -> bool:
        """Return whether to watch the current batch; called within the step, before it."""

    @abstractmethod
    def process(self, trainer: Trainer, place: TensorPath, tensor: Tensor) -> None:
        """Process a tensor within the step; it may be modified in place afterwards."""

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
        self.enter(trainer, stack)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if self._hooks is None and self.watches_validation:
            self.enter(trainer, stack)

    def enter(self, trainer: Trainer, stack: ExitStack) -> None:
        """Prepare for a fit, or for a validation outside `fit`."""
        self._hooks = ActivationHooks(trainer.model, partial(self._process_output, trainer))
        stack.callback(setattr, self, "_hooks", None)
        stack.callback(self._hooks.end)

    @override
    def on_before_forward(
        self,
        trainer: Trainer,
        model: Module,
        batch: Batch,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        if self._hooks is None or not (self.watches_validation or trainer.val_iterator is None):
            return
        if self.is_watched(trainer):
            self._num_calls.clear()
            self.before(trainer, model, args, kwargs)
            self._hooks.begin()

    def before(
        self, trainer: Trainer, model: Module, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Prepare for a watched batch, within the step."""

    @override
    def on_after_forward(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if self._hooks is not None:
            self._hooks.end()

    # ---- what

    def _process_output(
        self,
        trainer: Trainer,
        name: str,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        num = self._num_calls[name]
        self._num_calls[name] += 1
        call = f"{name}.call{num}" if num else name
        for path, tensor in named_tensors(output):
            self.process(trainer, TensorPath(call, "fwd", path), tensor)
            if tensor.grad_fn is not None:  # not a parameter: its hook would persist
                # A hook that returns a value would replace the gradient.
                see_grad = partial(self.process, trainer, TensorPath(call, "bwd", path))
                tensor.register_hook(see_grad)  # type: ignore[no-untyped-call]  # untyped in torch


class NamedTensorWatcher(TensorWatcher):
    """Base class of callbacks for which parameters and their gradients have names as well.

    A parameter has its own name and its value before the update. Its gradient, complete and
    unclipped, has the same name with `.grad` appended.
    """

    @abstractmethod
    def process_named(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        """Process a tensor within the step; it may be modified in place afterwards."""

    @override
    def process(self, trainer: Trainer, place: TensorPath, tensor: Tensor) -> None:
        self.process_named(trainer, place.key, tensor)

    @override
    def before(
        self, trainer: Trainer, model: Module, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        for name, param in named_params(model).items():
            self.process_named(trainer, name, param)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self.is_watched(trainer):
            for name, param in named_params(model).items():
                if param.grad is not None:
                    self.process_named(trainer, f"{name}.grad", param.grad)


def named_modules(model: Module) -> Iterator[tuple[str, Module]]:
    """Yield each module once, with its name in the uncompiled model."""
    for name, module in model.named_modules():
        if not _is_wrapper(module):
            yield uncompiled(f"{name}.").strip(".") or type(module).__name__, module


def named_params(model: Module) -> dict[str, Tensor]:
    """Return each parameter once, by its name in the uncompiled model."""
    params = dict(model.named_parameters())
    return {bare: params[name] for bare, name in bare_names(params).items()}


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested mappings and sequences with their paths, such as `.key.0`."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{path}.{key}")
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{path}.{index}")


def _is_wrapper(module: Module) -> bool:
    """Return whether a module is the wrapper of `torch.compile`."""
    return "_orig_mod" in module._modules


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor has a floating-point or complex dtype."""
    return tensor.is_floating_point() or tensor.is_complex()
