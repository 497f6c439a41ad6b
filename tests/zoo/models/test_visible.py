"""What may be seen: each rule by hand, and tiles of queries and keys against the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.visible import (
    Visible,
    bias_of,
    mask_of,
    of_keys,
    sums_of_diagonals,
    tiles,
    whole,
)

CPU = torch.device("cpu")


def drawn(num: int = 5, **rule: Any) -> list[str]:
    seen = mask_of(Visible(**rule), whole(num, 5), 5, CPU)
    assert seen is not None
    return ["".join(".x"[sees] for sees in row) for row in seen[-1].expand(num, 5).tolist()]


def test_a_window_of_two_shows_the_query_and_the_key_before() -> None:
    assert drawn(window=2) == ["x....", "xx...", ".xx..", "..xx.", "...xx"]


def test_sinks_stay_visible_to_all_later_queries() -> None:
    assert drawn(window=1, sinks=2) == ["x....", "xx...", "xxx..", "xx.x.", "xx..x"]


def test_a_packed_row_shows_each_document_to_itself_and_padding_to_itself() -> None:
    spans = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 1, 0, 0]])

    assert drawn(after=spans) == ["x....", "xx...", "..x..", "..xx.", "....x"]


def test_a_packed_row_of_an_encoder_shows_documents_in_both_directions() -> None:
    after, before = torch.tensor([[1, 0, 2, 1, 0]]), torch.tensor([[0, 1, 0, 1, 2]])

    shown = drawn(causal=False, after=after, before=before)

    assert shown == ["xx...", "xx...", "..xxx", "..xxx", "..xxx"]


def test_padding_is_hidden_but_from_queries_that_would_see_nothing() -> None:
    padding = torch.tensor([[True, True, False, False, True]])

    assert drawn(padding=padding) == ["x....", ".x...", "..x..", "..xx.", "..xx."]
    assert drawn(causal=False, padding=padding) == 5 * ["..xx."]


def test_an_offset_makes_queries_later_ones() -> None:
    assert drawn(2, offset=2) == ["xxx..", "xxxx."]
    assert drawn(2, offset=3, window=2) == ["..xx.", "...xx"]


def test_a_single_query_has_its_position() -> None:
    assert drawn(1, position=torch.tensor([3]), window=2) == ["..xx."]


@pytest.mark.parametrize(
    ("rule", "is_plain"),
    [
        ({}, True),
        ({"window": 5}, True),
        ({"window": 3, "sinks": 2}, True),
        ({"window": 4}, False),
        ({"after": torch.zeros(1, 5)}, False),
        ({"padding": torch.zeros(1, 5, dtype=torch.bool)}, False),
        ({"bias": torch.zeros(1, 5)}, False),
        ({"offset": 1}, False),
        ({"causal": False, "offset": 1}, True),
    ],
)
def test_a_rule_is_plain_if_it_is_causal_and_nothing_else(
    rule: dict[str, Any], is_plain: bool
) -> None:
    assert Visible(**rule).is_plain(5, 5) == is_plain


def pasted(visible: Visible, parts: list[Tensor], num_queries: int, height: int) -> Tensor:
    """Return values of tiles in their places among all queries and keys; elsewhere 0."""
    found = torch.zeros((*parts[0].shape[:-2], num_queries, 9), dtype=parts[0].dtype)
    for tile, part in zip(tiles(visible, num_queries, 9, height), parts, strict=True):
        begin = 0
        for start, stop in tile.keys:
            width = stop - start
            found[..., tile.first : tile.last, start:stop] = part[..., begin : begin + width]
            begin += width
    return found


RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 3},
    "sinks": {"window": 2, "sinks": 2},
    "offset": {"window": 3, "sinks": 1, "offset": 3},
    "two-sided": {"causal": False},
    "two-sided window": {"causal": False, "window": 2},
}


@pytest.mark.parametrize("height", [1, 2, 9])
@pytest.mark.parametrize("rule", RULES)
def test_tiles_have_all_keys_that_are_seen_and_their_biases(rule: str, height: int) -> None:
    visible = Visible(**RULES[rule])
    num_queries = 9 - visible.offset
    table = torch.randn(2, 9 if visible.causal else 17)
    visible = visible._replace(bias=table)
    everything = whole(num_queries, 9)
    seen, bias = mask_of(visible, everything, 9, CPU), bias_of(visible, everything, 9)
    assert bias is not None
    seen = torch.ones(1, num_queries, 9, dtype=torch.bool) if seen is None else seen

    masks, biases = [], []
    for tile in tiles(visible, num_queries, 9, height):
        mask, own = mask_of(visible, tile, 9, CPU), bias_of(visible, tile, 9)
        assert own is not None
        masks.append(torch.ones(own[:1].shape, dtype=torch.bool) if mask is None else mask)
        biases.append(own)

    assert torch.equal(pasted(visible, masks, num_queries, height), seen)
    assert torch.equal(pasted(visible, biases, num_queries, height) * seen, bias * seen)
    smallest = 0 if visible.causal else -8
    for query in range(num_queries):
        for key in range(9):
            if seen[0, query, key]:
                distance = query + visible.offset - key
                assert torch.equal(bias[:, query, key], table[:, distance - smallest])


def test_a_window_needs_few_keys() -> None:
    found = list(tiles(Visible(window=4, sinks=2), 100, 100, 10))

    assert found[5].keys == ((0, 2), (47, 60))
    assert of_keys(torch.arange(100), found[5], 0).tolist() == [0, 1, *range(47, 60)]


def test_sums_of_diagonals_are_by_distance() -> None:
    pairs = torch.arange(6.0).view(1, 2, 3)  # 0 1 2 / 3 4 5

    assert sums_of_diagonals(pairs).tolist() == [[2, 6, 4, 3]]
