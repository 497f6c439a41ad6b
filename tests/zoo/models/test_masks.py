"""Visible keys: windows, sinks and packed sequences; what cannot be combined."""

from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.masks import (
    WindowPattern,
    check_batch,
    is_windowed,
    merge_bias,
    visible_keys,
)

CPU = torch.device("cpu")


def drawn(**settings: Any) -> list[str]:
    visible = visible_keys(5, CPU, **settings)
    assert visible is not None
    assert visible.shape[1:] == (1, 5, 5)
    return ["".join(".x"[sees] for sees in row) for row in visible[-1, 0].tolist()]


def test_a_window_of_two_shows_the_query_and_the_key_before() -> None:
    assert drawn(window=2) == ["x....", "xx...", ".xx..", "..xx.", "...xx"]


def test_sinks_stay_visible_to_all_later_queries() -> None:
    assert drawn(window=1, sinks=2) == ["x....", "xx...", "xxx..", "xx.x.", "xx..x"]


def test_a_packed_row_shows_each_sequence_to_itself_and_padding_to_itself() -> None:
    spans = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 1, 0, 0]])

    assert drawn(spans=spans) == ["x....", "xx...", "..x..", "..xx.", "....x"]


@pytest.mark.parametrize("settings", [{}, {"window": 5}, {"window": 9}, {"window": 3, "sinks": 2}])
def test_what_hides_nothing_needs_no_mask(settings: dict[str, int]) -> None:
    assert visible_keys(5, CPU, **settings) is None


def test_a_bias_without_a_mask_is_causal() -> None:
    merged = merge_bias(torch.ones(2, 3, 3), None, 3, CPU)

    assert merged is not None
    assert merged.shape == (1, 2, 3, 3)
    hidden = float("-inf")
    assert merged[0, 1].tolist() == [[1, hidden, hidden], [1, 1, hidden], [1, 1, 1]]


def test_a_mask_without_a_bias_stays_boolean() -> None:
    visible = visible_keys(5, CPU, window=2)

    assert merge_bias(None, visible, 5, CPU) is visible
    assert merge_bias(None, None, 5, CPU) is None


@pytest.mark.parametrize(
    ("every_other", "pattern", "expected"),
    [
        (False, None, [True, True, True]),
        (True, None, [False, True, False]),
        (True, "full_attention_first", [False, True, False]),
        (True, "sliding_window_first", [True, False, True]),
    ],
)
def test_every_other_layer_has_the_window(
    every_other: bool, pattern: WindowPattern | None, expected: list[bool]
) -> None:
    found = [is_windowed(layer, every_other=every_other, pattern=pattern) for layer in range(3)]

    assert found == expected


def batch(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {"input_ids": (2, 5), **shapes}
    return {key: torch.zeros(shape, dtype=torch.int32) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "window", "positions", "facts"),
    [
        ({"attention_span": (2, 4)}, False, True, ("attention_span", "(2, 4)", "(2, 5)")),
        ({"position_ids": (5,)}, False, True, ("position_ids", "(5,)", "(2, 5)")),
        (
            {"attention_span": (2, 5), "position_ids": (2, 5)},
            True,
            True,
            ("attention_span", "attention_sliding_window_length", "use_vsl: false"),
        ),
        (
            {"position_ids": (2, 5)},
            False,
            False,
            ("position_ids", "position_embedding_type", "learned, fixed or rotary"),
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    shapes: dict[str, tuple[int, ...]], window: bool, positions: bool, facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_batch(batch(**shapes), has_window=window, uses_positions=positions)

    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_a_batch_that_fits_is_accepted() -> None:
    packed = batch(attention_span=(2, 5), position_ids=(2, 5))

    check_batch(batch(), has_window=True, uses_positions=False)
    check_batch(packed, has_window=False, uses_positions=False)
    check_batch(batch(position_ids=(2, 5)), has_window=True, uses_positions=True)
