"""Layers as blocks: compiled once for all layers, and recomputed in the backward pass."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from backends.blocks import checkpoint_activations
from modelzoo_trainer.zoo.models.decoder import Decoder
from tests.zoo.models.decoder_cases import CASES, NO_DROPOUT, SIZES

IDS = torch.arange(24).view(2, 12) * 7 % 51
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(autouse=True)
def _forget_compilations() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make(case: str, **changes: Any) -> Decoder:
    kind, settings = CASES[case]
    torch.manual_seed(3)
    return kind(**{**SIZES, **settings, **changes})


def results(model: Decoder) -> list[Any]:
    torch.manual_seed(5)
    loss = model(BATCH)["loss"]
    loss.backward()
    return [loss.item(), *(param.grad for param in model.parameters() if param.requires_grad)]


# CI: the plain block, two kinds of layers, and experts.
@pytest.mark.soak_cases("gptj", "qk norm*", "softcap, alibi", "falcon")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
@pytest.mark.parametrize("case", CASES)
def test_equal_layers_are_compiled_at_most_twice(case: str) -> None:
    model, plain = make(case, num_hidden_layers=12), make(case, num_hidden_layers=12)
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)

    torch.testing.assert_close(results(model), results(plain), rtol=1e-5, atol=1e-6)

    assert 1 <= counter.frame_count <= 2


# CI: all layers of each model; selected ones of two.
@pytest.mark.soak_cases("*-selective", "!gemma2-selective", "!experts, sandwich-selective")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_computed_again_gives_the_same_bits(
    case: str, mode: Literal["full", "selective"]
) -> None:
    model = make(case)
    checkpoint_activations(model, mode)

    for found, expected in zip(results(model), results(make(case)), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow_cases(every=4)
def test_a_decoder_runs_on_the_meta_device(case: str) -> None:
    kind, settings = CASES[case]
    with torch.device("meta"):
        model = kind(**{**SIZES, **settings, **NO_DROPOUT})
        model({key: value.to("meta") for key, value in BATCH.items()})["loss"].backward()

    trained = [param for param in model.parameters() if param.requires_grad]  # not ALiBi's slopes
    assert [param for param in trained if param.grad is None] == []
    assert {param.grad.device.type for param in trained} == {"meta"}  # type: ignore[union-attr]
