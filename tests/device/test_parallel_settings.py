"""What a configuration says of many processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.errors import BackendError
from backends.parallel.config import ParallelSettings, Sizes

make = ParallelSettings.from_options


def test_without_options_the_model_is_copied() -> None:
    assert make({}) == ParallelSettings()
    assert make({}).sizes(4) == Sizes(replicate=4)


@pytest.mark.parametrize(
    ("axes", "num", "expected"),
    [
        ({"shard": -1}, 4, (1, 4, 1)),
        ({"shard": 2}, 4, (2, 2, 1)),
        ({"shard": 2}, 2, (1, 2, 1)),
        ({"tensor": 2}, 4, (2, 1, 2)),
        ({"shard": -1, "tensor": 2}, 8, (1, 4, 2)),
        ({"replicate": 2, "shard": -1, "tensor": 2}, 8, (2, 2, 2)),
        ({"replicate": 2, "shard": 2, "tensor": 2}, 8, (2, 2, 2)),
    ],
)
def test_the_rest_is_filled_in(
    axes: dict[str, int], num: int, expected: tuple[int, int, int]
) -> None:
    sizes = make({"parallel": axes}).sizes(num)
    assert (sizes.replicate, sizes.shard, sizes.tensor) == expected
    assert sizes.num_data_shards == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("axes", "num", "expected", "of_parameters"),
    [
        ({"context": 4}, 4, (1, 1, 4, 1), (4, 1)),
        ({"context": 2}, 4, (2, 1, 2, 1), (4, 1)),
        ({"context": -1}, 4, (1, 1, 4, 1), (4, 1)),
        ({"shard": 2, "context": 2}, 8, (2, 2, 2, 1), (2, 4)),
        ({"shard": -1, "context": 2, "tensor": 2}, 16, (1, 4, 2, 2), (1, 8)),
    ],
)
def test_ranks_along_context_share_data_and_are_like_others_to_parameters(
    axes: dict[str, int],
    num: int,
    expected: tuple[int, int, int, int],
    of_parameters: tuple[int, int],
) -> None:
    sizes = make({"parallel": axes}).sizes(num)
    assert (sizes.replicate, sizes.shard, sizes.context, sizes.tensor) == expected
    assert sizes.num_data_shards == expected[0] * expected[1]
    assert sizes.num_data_shards * sizes.ranks_per_data_shard == num
    own = sizes.of_parameters
    assert (own.replicate, own.shard) == of_parameters
    assert (own.context, own.tensor) == (1, sizes.tensor)


def test_every_option_is_read() -> None:
    settings = make(
        {
            "parallel": {"replicate": 1, "shard": 2, "tensor": 2},
            "sharding": {
                "blocks": ["Layer"],
                "param_dtype": "bfloat16",
                "reduce_dtype": torch.float32,
                "reshard_after_forward": False,
                "meta_init": True,
            },
            "tensor_plan": {"up": "colwise"},
            "sequence_parallel": True,
            "find_unused_parameters": False,
        }
    )
    assert settings == ParallelSettings(
        replicate=1,
        shard=2,
        tensor=2,
        blocks=("Layer",),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        reshard_after_forward=False,
        meta_init=True,
        tensor_plan={"up": "colwise"},
        sequence_parallel=True,
    )


@pytest.mark.parametrize(
    ("axes", "num", "message"),
    [
        (
            {"replicate": 1, "shard": 4, "tensor": 2},
            4,
            "{replicate: 1, shard: 4, context: 1, tensor: 2}, which requires 8 processes",
        ),
        (
            {"shard": 3},
            4,
            "{replicate: -1, shard: 3, context: 1, tensor: 1}, which requires a multiple of 3",
        ),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes: dict[str, int], num: int, message: str) -> None:
    settings = make({"parallel": axes})
    with pytest.raises(BackendError) as caught:
        settings.sizes(num)
    assert message in str(caught.value)


SHARD = {"parallel": {"shard": 2}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paralel": {}}, "backend.paralel: no such option. Did you mean 'parallel'?"),
        (
            {"parallel": {"shrad": 2}},
            "backend.parallel.shrad: no such axis. Did you mean 'shard'?",
        ),
        ({"parallel": 4}, "backend.parallel: expected a dict, got 4."),
        (
            {"parallel": {"shard": 0}},
            "backend.parallel.shard: expected a number of processes >= 1, or -1 for the rest, got",
        ),
        (
            {"parallel": {"tensor": True}},
            "backend.parallel.tensor: expected a number of processes >= 1, or -1 for the rest",
        ),
        (
            {"parallel": {"context": 0}},
            "backend.parallel.context: expected a number of processes >= 1, or -1 for the rest",
        ),
        (
            {"parallel": {"shard": -1, "context": -1}},
            "backend.parallel: shard and context are -1",
        ),
        (
            {"parallel": {"shard": -1, "tensor": -1}},
            "backend.parallel: shard and tensor are -1",
        ),
        (
            SHARD | {"sharding": {"meta_int": True}},
            "backend.sharding.meta_int: no such setting. Did you mean 'meta_init'?",
        ),
        (
            SHARD | {"sharding": {"meta_init": 1}},
            "backend.sharding.meta_init: expected true or false, got 1.",
        ),
        (
            SHARD | {"sharding": {"blocks": "Layer"}},
            "backend.sharding.blocks: expected a list of class names, got 'Layer'.",
        ),
        (
            SHARD | {"sharding": {"param_dtype": "bfloat61"}},
            "backend.sharding.param_dtype: expected a floating-point dtype, got 'bfloat61'. "
            "Did you mean 'bfloat16'?",
        ),
        (
            {"sharding": {"param_dtype": "bfloat16"}},
            "backend.sharding.param_dtype is set, but backend.parallel.shard is 1.",
        ),
        (
            {"parallel": {"tensor": 2}, "tensor_plan": {"up": "columnwise"}},
            "backend.tensor_plan['up'] is 'columnwise'. Did you mean 'colwise'?",
        ),
        (
            {"tensor_plan": {"up": "colwise"}},
            "backend.tensor_plan is set, but backend.parallel.tensor is 1.",
        ),
        (
            {"sequence_parallel": True},
            "backend.sequence_parallel is true, but backend.parallel.tensor is 1.",
        ),
        (
            {"sequence_parallel": "yes"},
            "backend.sequence_parallel: expected true or false, got 'yes'.",
        ),
        (
            SHARD | {"find_unused_parameters": True},
            "backend.find_unused_parameters only applies to replicated models",
        ),
        (
            {"find_unused_parameters": "yes"},
            "backend.find_unused_parameters: expected true or false, got 'yes'.",
        ),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError) as caught:
        make(options)
    assert message in str(caught.value)
