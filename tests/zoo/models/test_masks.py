"""Layers with a window; masks for other models; what cannot be combined."""

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.masks import (
    WindowPattern,
    check_batch,
    hidden_padding,
    is_windowed,
    visible_keys,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("settings", [{}, {"window": 5}, {"window": 9}])
def test_what_hides_nothing_needs_no_mask(settings: dict[str, int]) -> None:
    assert visible_keys(5, CPU, **settings) is None


def test_a_mask_shows_the_keys_of_a_window() -> None:
    found = visible_keys(3, CPU, window=2)

    assert found is not None
    assert found.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]]


def test_padding_is_hidden_but_in_rows_that_have_nothing_else() -> None:
    assert hidden_padding(None) is None
    found = hidden_padding(torch.tensor([[1, 2, 0], [0, 0, 0]]))

    assert found is not None
    assert found.int().tolist() == [[0, 0, 1], [0, 0, 0]]


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
