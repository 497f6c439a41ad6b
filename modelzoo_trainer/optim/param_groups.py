"""Parameter groups: by tag, and by whether the parameters decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from typing_extensions import TypedDict

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.scheduler import NO_DECAY, Group

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.SyncBatchNorm,
)


class ParamFilter(TypedDict):
    """Which parameters get a tag.

    Attributes:
        params: A pattern of names, such as `*.mlp.*`, or several.
        tag: What schedules call the group.
    """

    params: str | list[str]
    tag: str


def make_param_groups(
    model: nn.Module,
    *,
    weight_decay: float | None,
    params: Sequence[ParamFilter] | None = None,
) -> list[Group]:
    """Return the trainable parameters in groups, each parameter once.

    Biases (names that contain "bias") and the parameters of normalization layers do not decay.
    The groups of the filters come first, in their order; within a tag, what decays comes first.

    Args:
        model: Its parameters are grouped in the order of `named_parameters`.
        weight_decay: Of what decays; None if the optimizer knows no weight decay.
        params: Filters that tag; a parameter belongs to the first that matches a name of it.

    Raises:
        ConfigError: If nothing is trainable, or a filter gets no parameter.
    """
    names = _names_of_trainable(model)
    if not names:
        raise ConfigError("the model has no trainable parameter, so an optimizer has no work.")
    tags = _tag(names, params or ())
    norms = _of_norm_layers(model)
    groups: list[Group] = []
    for tag in [*dict.fromkeys(entry["tag"] for entry in params or ()), None]:
        members = [param for param in names if tags.get(param) == tag]
        for is_exempt in (False, True):
            chosen = [p for p in members if _is_exempt(p, names[p], norms) == is_exempt]
            if weight_decay is None:
                chosen = [] if is_exempt else members
            if chosen:
                groups.append(_group(chosen, tag, weight_decay, is_exempt))
    return groups


def _group(
    params: list[nn.Parameter], tag: str | None, weight_decay: float | None, is_exempt: bool
) -> Group:
    group: Group = {"params": params}
    if weight_decay is not None:
        group["weight_decay"] = 0.0 if is_exempt else weight_decay
        group[NO_DECAY] = is_exempt
    if tag is not None:
        group["tag"] = tag
    return group


def _names_of_trainable(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the trainable parameters with all names of each: a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            names.setdefault(param, []).append(name)
    return names


def _tag(
    names: dict[nn.Parameter, list[str]], filters: Iterable[ParamFilter]
) -> dict[nn.Parameter, str]:
    tags: dict[nn.Parameter, str] = {}
    for idx, entry in enumerate(filters):
        patterns = entry["params"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        free = [param for param in names if param not in tags]
        matched = [param for param in free if _matches(names[param], patterns)]
        if not matched:
            some = ", ".join(names[param][0] for param in (free or list(names))[:3])
            raise ConfigError(
                f"params[{idx}]: {entry['params']!r} matches no trainable parameter that an "
                f"earlier filter left. Parameters have names such as {some}; patterns may have * "
                f"and ?."
            )
        tags |= dict.fromkeys(matched, entry["tag"])
    return tags


def _matches(names: list[str], patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _of_norm_layers(model: nn.Module) -> set[nn.Parameter]:
    return {
        param
        for module in model.modules()
        if _is_norm(module)
        for param in module.parameters(recurse=False)
    }


def _is_norm(module: Any) -> bool:
    name = type(module).__name__
    return isinstance(module, _NORMS) or "RMSNorm" in name or "LayerNorm" in name


def _is_exempt(param: nn.Parameter, names: list[str], norms: set[nn.Parameter]) -> bool:
    return param in norms or "bias" in names[0]
