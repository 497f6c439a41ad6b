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
    )


@pytest.mark.parametrize(
    ("axes", "num", "message"),
    [
        (
            {"replicate": 1, "shard": 4, "tensor": 2},
            4,
            "backend.parallel is {replicate: 1, shard: 4, tensor: 2}, which fits 8 processes, but "
            "there are 4. Start another number of processes, or set one axis to -1 (the rest) and "
            "the others so that their product divides 4.",
        ),
        (
            {"shard": 3},
            4,
            "backend.parallel is {replicate: -1, shard: 3, tensor: 1}, which fits a multiple of 3 "
            "processes, but there are 4. Start another number of processes, or set one axis to -1 "
            "(the rest) and the others so that their product divides 4.",
        ),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes: dict[str, int], num: int, message: str) -> None:
    settings = make({"parallel": axes})
    with pytest.raises(BackendError) as caught:
        settings.sizes(num)
    assert str(caught.value) == message


SHARD = {"parallel": {"shard": 2}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paralel": {}}, "backend.paralel: no such option. Did you mean 'parallel'?"),
        (
            {"parallel": {"shrad": 2}},
            "backend.parallel.shrad: no such axis. Did you mean 'shard'?",
        ),
        ({"parallel": 4}, "backend.parallel is 4; it must be a mapping."),
        (
            {"parallel": {"shard": 0}},
            "backend.parallel.shard is 0; it must be a whole number of processes, at least 1, or "
            "-1 for the rest.",
        ),
        (
            {"parallel": {"tensor": True}},
            "backend.parallel.tensor is True; it must be a whole number of processes, at least "
            "1, or -1 for the rest.",
        ),
        (
            {"parallel": {"shard": -1, "tensor": -1}},
            "backend.parallel: shard and tensor are both -1; only one axis can have the rest of "
            "the processes. Give the size of the other.",
        ),
        (
            SHARD | {"sharding": {"meta_int": True}},
            "backend.sharding.meta_int: no such setting. Did you mean 'meta_init'?",
        ),
        (
            SHARD | {"sharding": {"meta_init": 1}},
            "backend.sharding.meta_init is 1; it must be true or false.",
        ),
        (
            SHARD | {"sharding": {"blocks": "Layer"}},
            "backend.sharding.blocks is 'Layer'; it must be a list of class names.",
        ),
        (
            SHARD | {"sharding": {"param_dtype": "bfloat"}},
            "backend.sharding.param_dtype is 'bfloat'. Did you mean 'bfloat16'?",
        ),
        (
            {"sharding": {"param_dtype": "bfloat16"}},
            "backend.sharding.param_dtype is given, but nothing is sharded: "
            "backend.parallel.shard is 1. Set it, or leave backend.sharding out.",
        ),
        (
            {"parallel": {"tensor": 2}, "tensor_plan": {"up": "columnwise"}},
            "backend.tensor_plan['up'] is 'columnwise'. Did you mean 'colwise'?",
        ),
        (
            {"tensor_plan": {"up": "colwise"}},
            "backend.tensor_plan is given, but backend.parallel.tensor is 1. Set it, or leave the "
            "plan out.",
        ),
        (
            SHARD | {"find_unused_parameters": True},
            "backend.find_unused_parameters is for copies of a whole model; with "
            "backend.parallel.shard or tensor it has no meaning. Leave it out.",
        ),
        (
            {"find_unused_parameters": "yes"},
            "backend.find_unused_parameters is 'yes'; it must be true or false.",
        ),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError) as caught:
        make(options)
    assert str(caught.value) == message
