"""Muon for the matrices of hidden layers, with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, NonNegativeFloat, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.optimizer import Betas, OverModel
from modelzoo_trainer.optim.param_groups import Names, matching, names_of_trainable
from modelzoo_trainer.optim.scheduler import Group

HEADS: Final = ("*head.weight", "*classifier.weight", "*score.weight")
"""Default name patterns of matrices that AdamW updates: layers that compute logits."""

BIASES: Final = ("*bias", "*bias.*")
"""Name patterns of biases; stacked biases are matrices too."""

IS_MUON: Final = "use_muon"
"""Key of a parameter group: whether Muon updates it."""

_OF_MUON: Final = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
_OF_ADAMW: Final = ("betas", "eps")


@checked_dataclass
class Muon(OverModel, Optimizer):
    """Orthogonalized momentum for hidden matrices (Jordan et al. 2024), AdamW for the rest.

    Muon (torch's) updates the parameters with two dimensions, except embeddings (of a module
    `nn.Embedding` or `nn.EmbeddingBag`, or with "embed" in the name), biases (of a name or module
    that ends in "bias", such as the stacked ones of experts) and those that match `adamw_params`.
    AdamW updates these, norms, and all parameters with another number of dimensions. A parameter
    tied to an embedding is an embedding. If parameter groups are given, AdamW updates those with
    `use_muon: False`; Muon updates the matrices of the others.

    Args:
        lr: Learning rate of both, default 1e-3; `adjust_lr_fn` makes one value fit both.
        weight_decay: Of both, decoupled.
        momentum: Of Muon.
        nesterov: Whether Muon uses Nesterov momentum.
        ns_steps: Number of Newton-Schulz iterations of Muon, below 100.
        adjust_lr_fn: How Muon's learning rate depends on the shape of a matrix: `match_rms_adamw` =
            updates as large as AdamW's; `original` = sqrt(max(1, rows / columns)), which
            requires another learning rate: tag the matrices by `params`, and schedule the tags.
        betas: Of AdamW.
        eps: Of AdamW.
        adamw_params: Name patterns (globs) of matrices that AdamW updates, besides embeddings; None
            = `HEADS`.
    """

    weight_decay: NonNegativeFloat = 0.1
    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Ge(1), Lt(100)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-6
    adamw_params: list[str] | None = None

    @override
    def _build(self, **own: Any) -> None:
        is_hidden = _matrix_test(own["model"], own.pop("adamw_params"))
        super()._build(**own, is_hidden=is_hidden)

    @override
    def _begin(self, groups: Any, defaults: dict[str, Any]) -> None:
        own = {
            True: {key: defaults.pop(key) for key in _OF_MUON},
            False: {key: defaults.pop(key) for key in _OF_ADAMW},
        }
        Optimizer.__init__(self, list(_split(groups, defaults.pop("is_hidden"))), defaults)
        self._parts: dict[bool, Optimizer] = {}
        for is_muon, part in self._groups().items():
            make: Any = torch.optim.Muon if is_muon else torch.optim.AdamW
            self._parts[is_muon] = make(part, **defaults, **own[is_muon])

    def first_state(self, param: Tensor, group: Group) -> Mapping[str, Any]:
        """Return the state that a step creates, in torch's Muon or AdamW."""
        names = ("momentum_buffer",) if group[IS_MUON] else ("exp_avg", "exp_avg_sq")
        return dict.fromkeys(names, param)

    def _groups(self) -> dict[bool, list[Group]]:
        """Return the groups of Muon and of AdamW; the same objects as in `param_groups`."""
        found: dict[bool, list[Group]] = {}
        for group in self.param_groups:
            found.setdefault(group[IS_MUON], []).append(group)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon, groups in self._groups().items():
            part = self._parts[is_muon]
            part.param_groups, part.state = groups, self.state  # loading creates new ones
            part.step()
        return loss


def _matrix_test(model: object, adamw_params: Sequence[str] | None) -> Callable[[Tensor], bool]:
    """Return a function that returns whether Muon updates a parameter."""
    if not isinstance(model, nn.Module):
        if adamw_params is not None:
            raise ConfigError(
                "Muon.adamw_params: patterns need a model, but the optimizer was created from "
                "parameters. Pass the model, or remove adamw_params and set use_muon=False in the "
                "parameter groups that Muon must not update."
            )
        return lambda param: param.dim() == 2
    names = names_of_trainable(model)
    others = _of_embeddings(model) | set(matching(names, ("*embed*", *BIASES)))
    others |= _named(names, adamw_params)
    return lambda param: param.dim() == 2 and param not in others


def _named(names: Names, patterns: Sequence[str] | None) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()
    for pattern in HEADS if patterns is None else patterns:
        matched = matching(names, (pattern,))
        if not matched and patterns is not None:
            some = ", ".join(known_as[0] for known_as in list(names.values())[:3])
            raise ConfigError(
                f"Muon.adamw_params: {pattern!r} matches no trainable parameter. Parameters have "
                f"names such as {some}; * in a pattern matches any text."
            )
        found.update(matched)
    return found


def _of_embeddings(model: nn.Module) -> set[Tensor]:
    return {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }


def _split(groups: Any, is_hidden: Callable[[Tensor], bool]) -> Iterator[Group]:
    given = list(groups)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    for group in given:
        own = group["params"]
        members = [own] if isinstance(own, Tensor) else list(own)
        wanted = group.get(IS_MUON, True)
        for is_muon in (True, False):
            chosen = [param for param in members if (wanted and is_hidden(param)) is is_muon]
            if chosen:
                yield {**group, "params": chosen, IS_MUON: is_muon}
