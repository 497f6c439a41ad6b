"""Freezing and unfreezing of layer groups of a model, and freezing by names of parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from torch.nn import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Module,
    ModuleList,
    Parameter,
    SyncBatchNorm,
)

from modelzoo_trainer.core.parts.training_mode import STAYS_EVAL
from modelzoo_trainer.errors import ConfigError

_BATCH_NORMS: Final = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
_STAYS_FROZEN: Final = "_stays_frozen"  # of a module: whether its own parameters are never trained


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """A part of the model that is frozen as a whole."""

    name: str  # name in the model
    modules: tuple[Module, ...]  # modules with parameters of their own, in order
    all_modules: tuple[Module, ...]  # all modules, also those without parameters

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of the group, each once."""
        return _own_parameters(self.modules)

    @property
    def thawable(self) -> list[Parameter]:
        """Those that can be trained: what the loss depends on."""
        return _own_parameters(one for one in self.modules if not vars(one).get(_STAYS_FROZEN))

    @property
    def is_frozen(self) -> bool:
        """Whether none of its parameters is trainable."""
        return not any(param.requires_grad for param in self.parameters)


class ModelFreezer:
    """Freeze and unfreeze layer groups of a model, by index.

    Groups are the model's children, and the elements of children that are a `ModuleList`, without
    those that have no parameters. Parameters of the model itself are the first group. Index ranges
    include both ends; negative indices count from the last group.

    Args:
        model: The model, with the parameters that its optimizer has or will have.
        freeze_batch_norms: Whether to freeze parameters of batch normalization, too: in training
            mode its statistics still change, which does not fit a frozen scale.
    """

    def __init__(self, model: Module, freeze_batch_norms: bool = False) -> None:
        self.model = model
        self.freeze_batch_norms = freeze_batch_norms
        self._groups = [group for group in _groups_of(model) if group.modules]

    def get_layer_groups(self) -> list[LayerGroup]:
        """Return the groups, in order."""
        return list(self._groups)

    def get_layers(self) -> list[Module]:
        """Return all modules with parameters of their own, in order."""
        return [module for group in self._groups for module in group.modules]

    def get_trainable_parameters(self) -> list[Parameter]:
        """Return the trainable parameters, each once."""
        return [param for param in self.model.parameters() if param.requires_grad]

    def freeze(
        self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False
    ) -> None:
        """Freeze groups, in either direction; by default all but the last one.

        Args:
            from_index: One end.
            to_index: The other end.
            set_modules_as_eval: Whether to put the frozen modules into eval mode as well; they keep
                it when a trainer trains the model, until `unfreeze` puts them into training mode.

        Raises:
            ConfigError: If there is no such group.
        """
        for module in self._modules(*self._ends(from_index, to_index)):
            if isinstance(module, _BATCH_NORMS) and not self.freeze_batch_norms:
                continue
            for param in module.parameters(recurse=False):
                param.requires_grad_(False)
            if set_modules_as_eval:
                module.training = False
                vars(module)[STAYS_EVAL] = True

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[str, list[Parameter]]:
        """Unfreeze groups, in either direction; by default all.

        Args:
            from_index: One end.
            to_index: The other end.
            set_modules_as_training: Whether to put them into training mode as well.

        Returns:
            The parameters that were frozen, by group name, for an optimizer without them:
            `optimizer.add_param_group({"params": ...})`.

        Raises:
            ConfigError: If there is no such group.
        """
        first, last = self._ends(from_index, to_index)
        thawed: dict[str, list[Parameter]] = {}
        for group in self._groups[first : last + 1]:
            frozen = [param for param in group.thawable if not param.requires_grad]
            for param in frozen:
                param.requires_grad_(True)
            if frozen:
                thawed[group.name] = frozen
        if set_modules_as_training:
            for module in self._modules(first, last):
                module.training = True
                vars(module).pop(STAYS_EVAL, None)
        return thawed

    def _modules(self, first: int, last: int) -> Iterator[Module]:
        for group in self._groups[first : last + 1]:
            yield from group.all_modules

    def _ends(self, from_index: int, to_index: int) -> tuple[int, int]:
        """Return the first and the last group, in this order."""
        ends = self._index("from_index", from_index), self._index("to_index", to_index)
        return min(ends), max(ends)

    def _index(self, name: str, given: int) -> int:
        num = len(self._groups)
        if not -num <= given < num:
            if not num:
                kind = type(self.model).__name__
                raise ConfigError(f"{kind} has no parameters, so there is no group {given}.")
            names = ", ".join(repr(group.name) for group in self._groups)
            raise ConfigError(
                f"{name} is {given}, but there are {num} layer groups: {names}. Use an index from "
                f"{-num} to {num - 1}."
            )
        return given % num


def _groups_of(model: Module) -> Iterator[LayerGroup]:
    yield _group("", [model])
    for name, child in model.named_children():
        if isinstance(child, ModuleList):
            for key, element in child.named_children():
                yield _group(f"{name}.{key}", element.modules())
        else:
            yield _group(name, child.modules())


def _group(name: str, modules: Iterable[Module]) -> LayerGroup:
    found = tuple(modules)
    owners = (
        module for module in found if next(module.parameters(recurse=False), None) is not None
    )
    return LayerGroup(name=name, modules=tuple(owners), all_modules=found)


def _own_parameters(modules: Iterable[Module]) -> list[Parameter]:
    """Return the parameters of modules without their children, each once."""
    found = [param for module in modules for param in module.parameters(recurse=False)]
    return list(dict.fromkeys(found))


def freeze_for_good(module: Module) -> None:
    """Freeze a module that the loss does not depend on; `ModelFreezer` keeps it frozen."""
    module.requires_grad_(False)
    for part in module.modules():
        vars(part)[_STAYS_FROZEN] = True


def check_patterns(patterns: Iterable[str]) -> None:
    """Check the regular expressions of the setting `freeze`.

    Raises:
        ConfigError: If one is not valid.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"freeze: {pattern!r} is not a valid regular expression: {error}."
            ) from None


def freeze_matching(model: Module, patterns: Iterable[str], examples: str) -> None:
    """Freeze parameters if an expression is found in their names or their modules' names.

    Names come from the model, and from the Model Zoo by its `published_name`.

    Args:
        model: The model.
        patterns: Regular expressions.
        examples: Some that are found, for messages.

    Raises:
        ConfigError: If one is found in no name.
    """
    published: Callable[[str], str | None] = getattr(model, "published_name", lambda name: None)
    for pattern in patterns:
        frozen = [
            parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if any(re.search(pattern, one) for one in _names_of(name, published(name)))
        ]
        if not frozen:
            raise ConfigError(
                f"freeze: {pattern!r} is found in no name of a parameter or module. Examples: "
                f"{examples}."
            )
        for parameter in frozen:
            parameter.requires_grad = False


def _names_of(name: str, published: str | None) -> set[str]:
    """Return the own and the published name of a parameter, and of the modules that contain it."""
    names = [name] + ([] if published is None else [published.removeprefix("model.")])
    found = set()
    for one in names:
        parts = one.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return found
