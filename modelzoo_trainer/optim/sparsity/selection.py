"""Selection of the sparse parameters of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Final

from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.parameter import is_lazy

from modelzoo_trainer.base.constraints import Name, Names
from modelzoo_trainer.errors import ConfigError, suggest

log = logging.getLogger("modelzoo_trainer.sparsity")

Filter = Annotated[Name, "a glob"] | Annotated[Names, "a list of globs"]

_MOST_NAMES: Final = 12  # in a message
_FEW_NAMES: Final = 4  # in a log line
_DEFAULT: Final = (
    "the default (trainable parameters with two or more dimensions, except embeddings and biases)"
)


def select(
    model: Module, named: Mapping[str, Tensor], globs: tuple[str, ...] | None, where: str
) -> dict[str, Tensor]:
    """Return the parameters that a filter matches.

    `globs` None = trainable ones with two or more dimensions, except embeddings and biases; `where`
    names the setting in messages. A glob that matches no name is compared with the published ones,
    if the model has a method `published_name(name)`.

    Raises:
        ConfigError: If there is none, or one cannot be sparse.
    """
    found = _default(model, named) if globs is None else _matched(model, named, globs, where)
    if not found:
        given = _DEFAULT if globs is None else repr(list(globs))
        raise ConfigError(f"{where}: {given} matches no parameter. {_meant(model, named, globs)}")
    _check(model, found, where)
    return found


def _meant(model: Module, named: Mapping[str, Tensor], globs: tuple[str, ...] | None) -> str:
    """Return a suggestion for globs that match nothing."""
    for name, param in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, glob) for glob in globs or ()):
            known = next((own for own, other in named.items() if other is param), name)
            return f"Use {known!r}: {name!r} is another name of that parameter."
    telling = [name for name, param in named.items() if is_lazy(param) or param.dim() >= 2]
    if len(telling) <= _MOST_NAMES:
        return suggest((globs or ("",))[0], telling or named)
    return f"Names of parameters: {', '.join(telling[:_MOST_NAMES])}, ..."


def _default(model: Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    lazy = [name for name, param in named.items() if is_lazy(param)]
    if lazy:
        log.warning(
            "sparsity: parameters of lazy layers have no shape yet, so they stay dense: %s. Use "
            "other layers, such as Linear instead of LazyLinear.",
            ", ".join(map(repr, lazy)),
        )
    tables = {
        id(part.weight) for part in model.modules() if isinstance(part, (Embedding, EmbeddingBag))
    }
    return {
        name: param
        for name, param in named.items()
        if param.requires_grad
        and not is_lazy(param)
        and param.dim() >= 2
        and id(param) not in tables
        and not any(part.endswith("bias") for part in name.split("."))  # stacked, of experts
    }


def _matched(
    model: Module, named: Mapping[str, Tensor], globs: tuple[str, ...], where: str
) -> dict[str, Tensor]:
    """Return the parameters that one of the globs matches; warn of a glob that matches none."""
    published = getattr(model, "published_name", None)
    others = {name: published(name) or "" for name in named} if callable(published) else {}
    names: set[str] = set()
    unmatched = []
    for glob in globs:
        own = {name for name in named if fnmatchcase(name, glob)}
        if not own:
            own = {name for name, other in others.items() if fnmatchcase(other, glob)}
            if own:
                log.info(
                    "%s: %r, names of the Cerebras Model Zoo, matches %d parameters: %s%s.",
                    where,
                    glob,
                    len(own),
                    ", ".join(sorted(own)[:_FEW_NAMES]),
                    ", ..." if len(own) > _FEW_NAMES else "",
                )
        unmatched += [] if own else [glob]
        names |= own
    for glob in unmatched if names else ():
        log.warning("%s: %r matches no parameter.", where, glob)
    return {name: param for name, param in named.items() if name in names}


def _check(model: Module, found: Mapping[str, Tensor], where: str) -> None:
    gathered = {id(part.weight) for part in model.modules() if getattr(part, "sparse", False)}
    for name, param in found.items():
        why = None
        if is_lazy(param):
            why = "has no shape yet"
        elif not param.is_floating_point() or param.dim() == 0 or param.numel() == 0:
            why = "is not a floating-point tensor with one or more dimensions and values"
        elif id(param) in gathered:
            why = "has gradients in a sparse layout (sparse=True)"
        if why:
            raise ConfigError(
                f"{where}: {name!r} {why}, so it cannot be sparse. Exclude it with param_filter."
            )
