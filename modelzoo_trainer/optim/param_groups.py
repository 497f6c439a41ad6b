"""Parameter groups by tag, learning rate factor, and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import inf
from typing import Any, Protocol

from torch import nn
from typing_extensions import TypedDict

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.optim.scheduler import LR_FACTOR, NO_DECAY, Group

Names = Mapping[nn.Parameter, Sequence[str]]


class AdjustmentGroup(Protocol):
    """A value of a model's mapping `lr_adjustment_groups`."""

    @property
    def param_filter_patterns(self) -> Iterable[str]:
        """Globs of parameter names."""

    @property
    def scale(self) -> float:
        """The default factor."""


def lr_factors(
    model: nn.Module, names: Names, given: Mapping[str, float] | None
) -> dict[nn.Parameter, float]:
    """Return the learning rate factor of each parameter for which it is not 1.

    `given`: factors of the user, by the name of one of the model's `lr_adjustment_groups`.

    Raises:
        ConfigError: If a factor is given for a group that the model does not have or that has no
            trainable parameter, or is not a number >= 0.
    """
    groups: Mapping[str, AdjustmentGroup] | None = getattr(model, "lr_adjustment_groups", None)
    _check(model, groups, given or {})
    if groups is None:
        return {}
    members = {name: matching(names, group.param_filter_patterns) for name, group in groups.items()}
    own = {name: group.scale for name, group in groups.items() if group.scale != 1}
    factors: dict[nn.Parameter, float] = {}
    for chosen in (own, given or {}):
        widest_first = [name for name in groups if name in chosen]
        widest_first.sort(key=lambda name: -len(members[name]))
        for name in widest_first:
            if not members[name] and chosen is given:
                raise ConfigError(
                    f"adjust_learning_rate.{name}: no trainable parameter has a name like "
                    f"{' or '.join(groups[name].param_filter_patterns)}. Remove {name}."
                )
            factors |= dict.fromkeys(members[name], float(chosen[name]))
    return {param: factor for param, factor in factors.items() if factor != 1}


def matching(names: Names, patterns: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters with a name that matches a pattern."""
    globs = list(patterns)
    return [
        param
        for param, known_as in names.items()
        if any(fnmatchcase(name, pattern) for name in known_as for pattern in globs)
    ]


def _check(
    model: nn.Module, groups: Mapping[str, AdjustmentGroup] | None, given: Mapping[str, float]
) -> None:
    if given and groups is None:
        raise ConfigError(
            f"adjust_learning_rate is set for {', '.join(given)}, but {type(model).__name__} has "
            f"no such groups. In the model, define lr_adjustment_groups: a dict from group names "
            f"to objects with param_filter_patterns and scale. Or, instead of "
            f"adjust_learning_rate, set tags in params, and param_group_tags in the schedulers."
        )
    for name, factor in given.items():
        if name not in (groups or {}):
            raise ConfigError(
                f"adjust_learning_rate.{name}: {type(model).__name__} has no such group. "
                f"{suggest(name, groups or {})}"
            )
        if not 0 <= factor < inf:
            raise ConfigError(f"adjust_learning_rate.{name} is {factor}; it must be a number >= 0.")


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
        params: One or more name patterns, such as `*.mlp.*`.
        tag: Tag of these parameters, for schedules.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    params: str | list[str]
    tag: str


def make_param_groups(
    model: nn.Module,
    *,
    weight_decay: float | None,
    params: Sequence[ParamFilter] | None = None,
    lr: float | None = None,
    adjust_learning_rate: Mapping[str, float] | None = None,
) -> list[Group]:
    """Return the trainable parameters in groups, each parameter once.

    Biases (names that contain "bias") and the parameters of normalization layers have no weight
    decay. Groups are ordered by their first parameters; with equal tags and factors, those with
    weight decay come first.

    Args:
        model: Its parameters are grouped in the order of `named_parameters`.
        weight_decay: Of the parameters that decay; None if the optimizer has no weight decay.
        params: Filters that tag; a parameter gets the tags of all filters that match a name of it,
            or its name in the Cerebras Model Zoo, if the pattern matches no name of the model.
        lr: Learning rate of the groups without a factor; None = left to the optimizer and to the
            schedules, which ignore factors unless they belong to this package.
        adjust_learning_rate: Factors on the learning rate of the model's `lr_adjustment_groups`;
            they override the model's own, which apply by default.

    Raises:
        ConfigError: If nothing is trainable, a filter matches nothing, or a factor is invalid.
    """
    names = names_of_trainable(model)
    if not names:
        raise ConfigError(
            "All parameters of the model have requires_grad=False. Unfreeze some, or remove the "
            "optimizer to only validate."
        )
    tags = _tag(model, names, params or ())
    factors = lr_factors(model, names, adjust_learning_rate)
    norms = _of_norm_layers(model)
    members: dict[_Key, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
    for param, known_as in names.items():
        is_exempt = weight_decay is not None and (param in norms or "bias" in known_as[0])
        key = tags[param], factors.get(param, 1.0)
        members.setdefault(key, ([], []))[is_exempt].append(param)
    return [
        {"params": chosen, **_decay(weight_decay, is_exempt), **_rate(lr, key[1]), **_tags(key[0])}
        for key, halves in members.items()
        for is_exempt, chosen in zip((False, True), halves, strict=True)
        if chosen
    ]


_Key = tuple[tuple[str, ...], float]  # tags, learning rate factor


def _decay(weight_decay: float | None, is_exempt: bool) -> Group:
    if weight_decay is None:
        return {}
    return {"weight_decay": 0.0 if is_exempt else weight_decay, NO_DECAY: is_exempt}


def _rate(lr: float | None, factor: float) -> Group:
    if factor == 1:
        return {}
    return {LR_FACTOR: factor} if lr is None else {"lr": lr * factor, LR_FACTOR: factor}


def _tags(tags: tuple[str, ...]) -> Group:
    return {"tags": list(tags)} if tags else {}


def names_of_trainable(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the trainable parameters with all names of each: tied ones have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            names.setdefault(param, []).append(name)
    return names


def _tag(
    model: nn.Module, names: dict[nn.Parameter, list[str]], filters: Iterable[ParamFilter]
) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the tags of each parameter, in the order of the filters.

    A pattern that matches no name here is one of names in the Cerebras Model Zoo, if the model has
    a method `published_name(name)`.
    """
    published = _published(model, names)
    tags: dict[nn.Parameter, tuple[str, ...]] = dict.fromkeys(names, ())
    filters = list(filters)
    for key in {key for one in filters for key in one} - {"params", "tag"}:
        raise ConfigError(
            f"params: a filter has the key {key!r}, which has no effect. A filter has params and "
            f"tag; to set a learning rate, use adjust_learning_rate or a schedule of the tag."
        )
    for idx, entry in enumerate(filters):
        patterns, tag = entry["params"], entry["tag"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        matched = [
            param
            for pattern in patterns
            for param in matching(names, (pattern,)) or matching(published, (pattern,))
        ]
        if not matched:
            some = ", ".join(known_as[0] for known_as in list(names.values())[:3])
            raise ConfigError(
                f"params[{idx}]: {entry['params']!r} matches no trainable parameter. Parameters "
                f"have names such as {some}; * in a pattern matches any text."
            )
        for param in matched:
            if tag not in tags[param]:
                tags[param] = (*tags[param], tag)
    return tags


def _published(model: nn.Module, names: Names) -> dict[nn.Parameter, list[str]]:
    """Return the names in the Cerebras Model Zoo of the parameters that have one."""
    function: Any = getattr(model, "published_name", None)
    if not callable(function):
        return {}
    return {
        param: [theirs for name in known_as if (theirs := function(name)) is not None]
        for param, known_as in names.items()
    }


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
