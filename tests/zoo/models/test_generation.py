"""Generation with a cache is generation without one, for every option of the decoders."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.kv_cache import KeyValueCache
from tests.zoo.models.attention_options import (
    ALIBI,
    EVERY_OTHER,
    GROUPED,
    LENGTH,
    OPTIONS,
    ROTARY,
    make,
    tokens,
)

EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2}
CASES: dict[str, dict[str, Any]] = OPTIONS | {
    "learned": {},
    "learned with an offset": {"position_embedding_offset": 2},
    "final softcap": {"final_logit_softcapping": 3.0, "output_logits_scale": 2.0},
    "rotary, grouped": ROTARY | GROUPED,
    "no positions": {"position_embedding_type": None},
    "experts": {"moe": EXPERTS},
    "experts by position": {"moe": {"num_experts": 4, "top_k": 2, "routing_algorithm": "uniform"}},
    "experts by row": {
        "moe": EXPERTS | {"router_selection_nonlinearity": "sinkhorn"},
    },
    "experts by token": {"moe": {"num_experts": 4, "routing_algorithm": "hash"}},
}
OF_CASES = pytest.mark.parametrize("changes", CASES.values(), ids=CASES)


def recorded(model: Decoder, start: Tensor, num: int, **how: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens and the logits that each new one was drawn from."""
    scores = []

    def see(_: Any, __: Any, output: Tensor) -> None:
        scores.append(output[:, -1])

    handle = model.lm_head.register_forward_hook(see)
    made = model.generate(start, num, temperature=0, **how)
    handle.remove()
    return made, torch.stack(scores)


@OF_CASES
@pytest.mark.slow_cases(every=4)
def test_the_cache_changes_neither_tokens_nor_logits(changes: dict[str, Any]) -> None:
    model = make(**changes)
    start = tokens(2, 3)

    made, scores = recorded(model, start, LENGTH + 4)  # 7 of them beyond the context

    expected, expected_scores = recorded(model, start, LENGTH + 4, use_cache=False)
    assert torch.equal(made, expected)
    torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, LENGTH, LENGTH + 5])
def test_the_prompt_has_any_length(length: int) -> None:
    model = make(**ALIBI)

    made = model.generate(tokens(1, length), 3, temperature=0)

    assert torch.equal(made, model.generate(tokens(1, length), 3, temperature=0, use_cache=False))


def test_each_step_computes_one_token_within_the_context() -> None:
    model = make(**ROTARY)
    seen: list[int] = []
    model.layers[0].register_forward_hook(lambda _, args, output: seen.append(args[0].shape[1]))

    model.generate(tokens(1, 5), 10)

    assert seen == [5, 1, 1, 1, 1, 1, 1, 1, 12, 12]


def test_the_cache_has_room_for_the_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []
    make_caches = Decoder.make_caches

    def see(self: Decoder, length: int) -> list[KeyValueCache] | None:
        rooms.append(length)
        return make_caches(self, length)

    monkeypatch.setattr(Decoder, "make_caches", see)
    model = make()

    model.generate(tokens(1, 3), 4)
    model.generate(tokens(1, 3), 100)

    assert rooms == [7, LENGTH]


def test_sampling_draws_the_same_tokens_with_the_cache() -> None:
    model = make(**ROTARY)
    made = [
        model.generate(
            tokens(2, 3),
            6,
            temperature=0.7,
            top_k=5,
            use_cache=use_cache,
            generator=torch.Generator().manual_seed(0),
        )
        for use_cache in (True, False)
    ]

    assert torch.equal(*made)


@pytest.mark.parametrize(
    "changes", [ALIBI | GROUPED, ROTARY | EVERY_OTHER], ids=["alibi", "window"]
)
def test_generation_in_bfloat16_stays_close(changes: dict[str, Any]) -> None:
    model = make(**changes)

    with torch.autocast("cpu", torch.bfloat16):
        made, scores = recorded(model, tokens(2, 3), 8)
        # The same tokens again, so that the logits can be compared.
        expected = torch.stack([model.eval().logits(made[:, :n])[:, -1] for n in range(3, 11)])

    assert scores.dtype == torch.bfloat16
    assert (scores - expected).float().norm() < 0.05 * expected.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi, window", "window"])
def test_compiled_layers_generate_without_a_compilation_for_each_token(name: str) -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    model = make(**OPTIONS[name])
    expected = model.generate(tokens(2, 3), 8, temperature=0)
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)

    made = model.generate(tokens(2, 3), 8, temperature=0)

    assert torch.equal(made, expected)
    assert counter.frame_count <= 4  # first tokens and next ones, for two kinds of layers
    torch.compiler.reset()
