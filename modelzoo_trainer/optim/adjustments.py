"""Factors on the learning rate of groups of parameters that a model names.

A model that wants its parameters to learn at rates of their own has an attribute
`lr_adjustment_groups`: a mapping from names to objects with `param_filter_patterns` (globs on
names of parameters) and `scale` (the factor that the model itself asks for: muP's, else 1). The
argument `adjust_learning_rate` of every optimizer sets factors by hand.

A parameter may be in several groups. Then a factor given by hand wins over the model's own, and
of two of one kind that of the narrower group (fewer parameters), or of the later one in the
model's mapping if they are equally wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import inf
from typing import Protocol

from torch import nn

from modelzoo_trainer.errors import ConfigError, suggest

Names = Mapping[nn.Parameter, Sequence[str]]


class AdjustmentGroup(Protocol):
    """What a model's `lr_adjustment_groups` maps names to."""

    @property
    def param_filter_patterns(self) -> Iterable[str]:
        """Globs on names of parameters."""

    @property
    def scale(self) -> float:
        """The factor without one given by hand."""


def lr_factors(
    model: nn.Module, names: Names, given: Mapping[str, float] | None
) -> dict[nn.Parameter, float]:
    """Return the factor on the learning rate of each parameter for which it is not 1.

    Args:
        model: Its `lr_adjustment_groups` are used, if it has any.
        names: The trainable parameters, with all names of each.
        given: Factors by hand, by the name of a group.

    Raises:
        ConfigError: If a factor is given for a group that the model does not have, or that has
            no trainable parameter, or is not a number from 0 on.
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
                    f"{' or '.join(groups[name].param_filter_patterns)}. Leave it out."
                )
            factors |= dict.fromkeys(members[name], float(chosen[name]))
    return {param: factor for param, factor in factors.items() if factor != 1}


def matching(names: Names, patterns: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of which a name matches a pattern.

    Args:
        names: All names of each.
        patterns: Globs.
    """
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
            f"adjust_learning_rate is given for {', '.join(given)}, but {type(model).__name__} "
            f"has no such groups. Give the model an attribute lr_adjustment_groups, a mapping "
            f"from names to objects with param_filter_patterns and scale, or use tags (params)."
        )
    for name, factor in given.items():
        if name not in (groups or {}):
            raise ConfigError(
                f"adjust_learning_rate.{name}: {type(model).__name__} has no such group. "
                f"{suggest(name, groups or {})}"
            )
        if not 0 <= factor < inf:
            raise ConfigError(
                f"adjust_learning_rate.{name} is {factor}; it must be a number from 0 on."
            )
