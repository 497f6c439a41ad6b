"""Rows of a batch whose positions are split over processes: context parallelism.

Each process computes the states of its own positions; see `ContextParallel`, which the backend
gives the model.

Dimension letters: B batch, T positions of a row, t own positions, N heads, G groups of keys and
values, D head dimension, E routed experts.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from modelzoo_trainer.base.devices import ContextParallel
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.attend import attend
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.language_head import Scored
from modelzoo_trainer.zoo.models.routing import Statistics
from modelzoo_trainer.zoo.models.visible import Visible

_T = TypeVar("_T", Tensor, Tensor | None)


def check_rows(settings: DecoderSettings, parallel: ContextParallel) -> None:
    """Check that a decoder can compute positions of a row in different processes.

    Raises:
        ConfigError: If the choice of experts depends on the states of whole rows.
    """
    experts = settings.experts
    if experts is not None and "sinkhorn" in (
        experts.router_selection_nonlinearity,
        experts.expert_weighting_nonlinearity,
    ):
        raise ConfigError(
            f"backend.parallel.context is {parallel.size}, but the model's moe balances experts by "
            f"sinkhorn over whole rows, which processes split. Use another nonlinearity of the "
            f"router, or backend.parallel.context: 1."
        )


def own_places(parallel: ContextParallel, input_ids: Tensor) -> Tensor:
    """Return the places of own positions in their rows.

    Shapes:
        input_ids: (B, T). Returns: (t,) integer.

    Raises:
        UnsplittableBatch: If rows of this length cannot be split.
    """
    return parallel.take(torch.arange(input_ids.shape[1], device=input_ids.device), 0)


def attend_own(
    parallel: ContextParallel,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    visible: Visible,
    **options: Any,
) -> Tensor:
    """Return the attention output of own queries over the keys and values of whole rows.

    `visible`: of whole rows. `options`: as of `attend`.

    Shapes:
        queries: (B, N, t, D). keys, values: (B, G, t, D). Returns: as queries.
    """
    keys, values = parallel.gather(torch.stack((keys, values)), dim=3).unbind()
    attended = [
        attend(
            own,
            keys[:, :, :end],
            values[:, :, :end],
            visible=_up_to(end, start, visible),
            **options,
        )
        for own, (start, end) in zip(
            queries.chunk(2, dim=2), parallel.chunks(keys.shape[2]), strict=True
        )
    ]
    return torch.cat(attended, dim=2)


def _up_to(end: int, start: int, visible: Visible) -> Visible:
    """Return what queries from `start` to `end` see of the keys up to `end`; causal."""
    after, padding = visible.after, visible.padding
    return visible._replace(
        offset=start,
        after=None if after is None else after[:, :end],
        padding=None if padding is None else padding[:, :end],
    )


def taken(parallel: ContextParallel | None, tensor: _T) -> _T:
    """Return own positions of a tensor (B, T, ...), if there is one and rows are split."""
    if parallel is None or tensor is None:
        return tensor
    return parallel.take(tensor)


def whole_scores(parallel: ContextParallel, own: Scored) -> Scored:
    """Return the scores of whole rows; `losses` stay as they are, of own positions."""
    return own._replace(
        total=parallel.total(own.total),
        hits=None if own.hits is None else parallel.gather(own.hits.float()) != 0,
        logits=None if own.logits is None else parallel.gather(own.logits),
    )


def whole_statistics(
    parallel: ContextParallel, routed: Sequence[Statistics], own: Tensor, whole: Tensor
) -> list[Statistics]:
    """Return the statistics of the routing of whole rows from the ones of own positions.

    `own`, `whole`: nonzero where a token counts, at own positions and in whole rows.

    Shapes:
        own: (B, t). whole: (B, T).
    """
    kept = [one for layer in routed for one in layer if one is not None]
    num_own, num = ((one != 0).sum(dim=1, keepdim=True) for one in (own, whole))
    found = parallel.total(torch.stack(kept) * (num_own / num.clamp(min=1)))
    rest = iter(found.unbind())
    return [
        Statistics(*(None if one is None else next(rest) for one in layer))  # type: ignore[arg-type]
        for layer in routed
    ]
