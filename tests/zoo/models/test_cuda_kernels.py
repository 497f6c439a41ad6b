"""Which kernels a decoder asks for on CUDA, with tensors on `meta`, which stands for it here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from modelzoo_trainer.zoo.models import attend_flex
from modelzoo_trainer.zoo.models.attend import attend
from modelzoo_trainer.zoo.models.registry import model_class

LENGTH, VOCAB = 256, 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 128,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "nonlinearity": "swiglu",
}
GROUPED = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}


class Calls(TorchFunctionMode):
    """Records the arguments of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: list[dict[str, Any]] = []
        self.flexed: list[dict[str, Any]] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.fused.append({**kwargs, "dtype": args[0].dtype, "device": args[0].device.type})
        return func(*args, **kwargs)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor whose last dimension has a length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.rows = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor) and one.dim() > 1 and one.shape[-1] == self.length:
                self.rows = max(self.rows, one.numel() // self.length)
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Return what a forward pass calls; `flex_attention` is recorded and not computed."""
    found = Calls()

    def flex(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        found.flexed.append({**options, "dtype": queries.dtype, "device": queries.device.type})
        return torch.empty_like(queries)

    monkeypatch.setattr(attend_flex, "_flex_attention", lambda: flex)
    for kernel in ("has_trained_flex_attention", "has_fused_dropout"):
        monkeypatch.setattr(sys.modules[attend.__module__], kernel, lambda device: True)
    with torch.device("meta"), found:
        yield found


def batch_of(rows: int = 2, **more: Callable[[], Tensor]) -> dict[str, Tensor]:
    tokens = torch.zeros(rows, LENGTH, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens, **{key: make() for key, make in more.items()}}


def forward(batch: dict[str, Tensor], **settings: Any) -> None:
    model_class("gpt2")(**{**SIZES, **settings}).bfloat16()(batch)


@pytest.mark.parametrize("settings", [{}, GROUPED], ids=["all heads", "grouped heads"])
def test_causal_attention_meets_the_conditions_of_the_flash_kernel(
    settings: dict[str, Any], calls: Calls
) -> None:
    forward(batch_of(), **settings)
    assert calls.flexed == []
    assert len(calls.fused) == SIZES["num_hidden_layers"]
    for one in calls.fused:
        assert one["attn_mask"] is None  # what flash refuses
        assert one["is_causal"]
        assert one["enable_gqa"] == bool(settings)  # groups are not repeated
        assert (one["dtype"], one["device"]) == (torch.bfloat16, "meta")


def spans() -> Tensor:
    return torch.zeros(2, LENGTH, dtype=torch.int32)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"attention_sliding_window_length": 64}, {}),
        ({}, {"attention_span": spans, "position_ids": spans}),
        ({"attention_logit_softcapping": 50.0}, {}),
        ({"position_embedding_type": "alibi"}, {}),
        ({"position_embedding_type": "relative"}, {}),
        ({"attention_sliding_window_length": 64, **GROUPED}, {}),
    ],
    ids=["window", "packed", "soft cap", "alibi", "relative", "window and grouped heads"],
)
def test_all_else_is_flex_attention_without_a_mask_of_all_pairs(
    settings: dict[str, Any], more: dict[str, Any], calls: Calls
) -> None:
    with Largest(LENGTH) as largest:
        forward(batch_of(**more), **settings)
    assert calls.fused == []
    assert len(calls.flexed) == SIZES["num_hidden_layers"]
    for one in calls.flexed:
        assert one["block_mask"] is not None
        assert one["enable_gqa"] == ("attention_module" in settings)
        assert (one["dtype"], one["device"]) == (torch.bfloat16, "meta")
    assert largest.rows < LENGTH


def test_dropout_of_attention_stays_in_the_fused_kernel(calls: Calls) -> None:
    forward(batch_of(), attention_dropout_rate=0.1)
    assert calls.flexed == []
    assert {one["dropout_p"] for one in calls.fused} == {0.1}


def test_the_loss_has_no_logits_of_all_tokens(calls: Calls) -> None:
    rows = 64
    with Largest(VOCAB) as largest:
        forward(batch_of(rows))
    assert 0 < largest.rows < rows * LENGTH
