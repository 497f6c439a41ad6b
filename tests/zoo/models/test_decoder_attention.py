"""Windows, packed sequences and positions as parts of a whole decoder."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from backends.blocks import checkpoint_activations
from backends.sync_guard import SyncGuard
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.gptj import GptJ
from tests.zoo.models.attention_options import (
    ALIBI,
    EVERY_OTHER,
    GROUPED,
    LENGTH,
    OPTIONS,
    RELATIVE,
    ROTARY,
    VOCAB,
    WINDOW,
    batch_for,
    make,
    packed,
    tokens,
)
from tests.zoo.models.attention_reference import attention

OF_OPTIONS = pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)


@OF_OPTIONS
def test_every_parameter_that_is_trained_gets_a_gradient(changes: dict[str, Any]) -> None:
    model = make(**changes)

    model({"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH)})["loss"].backward()

    params = dict(model.named_parameters())
    frozen = (
        {"position_bias.slopes.weight"} if changes.get("alibi_trainable_slopes") is None else set()
    )
    without = {name for name, param in params.items() if param.grad is None}
    assert without == frozen & params.keys()


@OF_OPTIONS
def test_a_later_token_does_not_change_earlier_logits(changes: dict[str, Any]) -> None:
    model = make(**changes).eval()
    before = tokens(1, LENGTH)
    after = before.clone()
    after[0, 7] = (after[0, 7] + 1) % VOCAB

    first, second = model.logits(before), model.logits(after)

    torch.testing.assert_close(first[:, :7], second[:, :7], rtol=0, atol=1e-6)
    assert (first[:, 7:8] - second[:, 7:8]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position_embedding_type": "fixed"},
        ROTARY,
        ALIBI,
        RELATIVE,
        ROTARY | GROUPED,
        ROTARY | {"kind": GptJ},
    ],
    ids=["learned", "fixed", "rotary", "alibi", "relative", "grouped", "gptj"],
)
def test_packed_sequences_have_the_logits_of_separate_ones(changes: dict[str, Any]) -> None:
    model = make(**changes).eval()
    batch = packed([[5, 4, 2], [12]])

    found = model(batch)["logits"]

    ids = batch["input_ids"]
    parts = [model.logits(part) for part in (ids[:1, :5], ids[:1, 5:9], ids[:1, 9:11], ids[1:])]
    torch.testing.assert_close(found[:1, :11], torch.cat(parts[:3], dim=1), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1:], parts[3], rtol=0, atol=1e-5)


def test_a_window_limits_how_far_one_layer_sees() -> None:
    model = make(num_hidden_layers=1, **ROTARY, **WINDOW).eval()
    before = tokens(1, LENGTH)
    after = before.clone()
    after[0, 2] = (after[0, 2] + 1) % VOCAB

    moved = (model.logits(before) - model.logits(after)).abs().amax(dim=-1)[0] > 1e-4

    assert moved.tolist() == [False, False, True, True, True] + [False] * 7


def test_sinks_stay_visible_beyond_the_window() -> None:
    changes = {"kind": GptJ, "num_hidden_layers": 1, "attention_sink_tokens": 2} | ROTARY | WINDOW
    model = make(**changes).eval()
    before = tokens(1, LENGTH)
    after = before.clone()
    after[0, 1] = (after[0, 1] + 1) % VOCAB

    moved = (model.logits(before) - model.logits(after)).abs().amax(dim=-1)[0] > 1e-4

    assert moved.tolist() == [False] + [True] * 11


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [False, True, False, True]),
        ("full_attention_first", [False, True, False, True]),
        ("sliding_window_first", [True, False, True, False]),
    ],
)
def test_the_pattern_chooses_the_layers_with_the_window(pattern: Any, expected: list[bool]) -> None:
    model: Any = make(
        num_hidden_layers=4,
        sliding_window_every_other_decoder_layer_pattern=pattern,
        **EVERY_OTHER,
    )

    assert [layer.attention.is_windowed for layer in model.layers] == expected


def test_sequences_within_the_window_are_bitwise_those_without_it() -> None:
    ids = tokens(2, LENGTH)

    within = make(attention_sliding_window_length=LENGTH, **ROTARY).logits(ids)

    assert torch.equal(within, make(**ROTARY).logits(ids))


def test_products_are_divided_by_the_number_of_the_layer() -> None:
    model: Any = make(scale_qk_dot_by_layer_idx=True, num_hidden_layers=3).double()
    found: list[tuple[Tensor, Tensor]] = []
    for layer in model.layers:
        layer.attention.register_forward_hook(
            lambda _, args, output: found.append((args[0], output))
        )
    model.logits(tokens(1, 5))

    for index, (layer, (hidden, output)) in enumerate(zip(model.layers, found, strict=True)):
        own = layer.attention
        heads = [
            part(hidden).view(1, 5, 4, 8).transpose(1, 2)
            for part in (own.q_proj, own.k_proj, own.v_proj)
        ]
        expected = attention(*heads, own.scale / (index + 1)).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(output, own.o_proj(expected))


def test_positions_of_the_batch_reach_learned_positions_without_spans() -> None:
    model = make()
    model.requested_outputs = ("logits",)
    batch = {"input_ids": tokens(1, 4), "labels": tokens(1, 4)}

    moved = model({**batch, "position_ids": torch.tensor([[0, 5, 6, 11]])})["logits"]

    table = model.position_embeddings
    assert table is not None
    with torch.no_grad():
        table.weight[:4] = table.weight[[0, 5, 6, 11]]
    assert torch.equal(moved, model(batch)["logits"])


def test_a_packed_batch_is_refused_by_a_model_with_a_window() -> None:
    with pytest.raises(ConfigError, match=r"attention_span .*attention_sliding_window_length"):
        make(**WINDOW)(packed([[12]]))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window_every_other_decoder_layer": True},
        WINDOW | {"sliding_window_every_other_decoder_layer_pattern": "sliding_window_first"},
        {"alibi_trainable_slopes": True},
        {"num_relative_attention_buckets": 64},
        {"pos_scaling_factor": 2.0},
        {"rope_theta": 500000.0},
        {"rotary_dim": 4},
        {"scale_output_logits_by_d": False},
        {"attention_type": "dot_product", "scale_qk_dot_by_d": True},
    ],
)
def test_a_setting_without_its_condition_is_reported(changes: dict[str, Any]) -> None:
    *_, key = changes
    with pytest.warns(UserWarning, match=rf"{key} .*has no effect without"):
        make(**changes)


@pytest.mark.slow_cases("*window", "every other", "softcap, alibi", "layer index", every=4)
@OF_OPTIONS
def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place(
    changes: dict[str, Any],
) -> None:
    with torch.device("meta"):
        moved = make(**changes)
        outputs = moved({"input_ids": torch.ones(2, 5, dtype=torch.int), "labels": tokens(2, 5)})
        outputs["loss"].backward()
    moved.to_empty(device="cpu")
    for param in moved.parameters():
        torch.nn.init.constant_(param, float("nan"))
    torch.manual_seed(7)
    moved.reset_parameters()
    built = make(**changes)
    torch.manual_seed(7)
    built.reset_parameters()

    expected = built.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in moved.state_dict().items())


# CI: all layers for each option; selected ones for three.
@pytest.mark.soak_cases(
    "selective-*", "!selective-relative", "!selective-every other", "!selective-gptj, sinks"
)
@pytest.mark.slow_cases("selective-[!r]*", every=4)
@OF_OPTIONS
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_keeps_losses_and_gradients(
    mode: Any, changes: dict[str, Any]
) -> None:
    plain, recomputed = make(**changes), make(**changes)
    checkpoint_activations(recomputed, mode)
    batch = batch_for(changes)

    losses = [model(batch)["loss"] for model in (plain, recomputed)]
    for loss in losses:
        loss.backward()

    assert torch.equal(*losses)
    for own, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        assert own.grad is None or torch.equal(own.grad, other.grad)


@OF_OPTIONS
def test_a_step_reads_nothing_on_the_host(changes: dict[str, Any]) -> None:
    model, guard = make(**changes), SyncGuard()
    batch = batch_for(changes)
    guard.arm()
    try:
        model(batch)["loss"].backward()
    finally:
        guard.disarm()

    assert guard.num_refused == 0


# CI: a bias, a mask, two kinds of layers, and layers that differ in a number.
@pytest.mark.soak_cases("trained slopes", "fixed", "window", "alibi, window", "softcap", "gptj, *")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's tracing
@OF_OPTIONS
def test_twelve_layers_are_compiled_once_for_each_kind(changes: dict[str, Any]) -> None:
    torch.compiler.reset()
    model = make(num_hidden_layers=12, hidden_size=16, **changes)
    model.requested_outputs = ("logits",)
    batch = batch_for(changes)
    expected = model(batch)["logits"]
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)

    for _ in range(2):
        found = model(batch)["logits"]

    kinds = 2 if changes.get("sliding_window_every_other_decoder_layer") else 1
    assert counter.frame_count == kinds
    torch.testing.assert_close(found, expected)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained slopes", "relative", "every other", "gptj, sinks"])
def test_a_whole_model_is_one_graph(name: str) -> None:
    torch.compiler.reset()
    changes = OPTIONS[name]
    model = make(**changes)
    batch = batch_for(changes)
    loss = model(batch)["loss"]
    loss.backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled_loss = compiled(batch)["loss"]
    compiled_loss.backward()

    torch.testing.assert_close(compiled_loss, loss)
    found = {name: param.grad for name, param in model.named_parameters()}
    torch.testing.assert_close(found, expected)
    torch.compiler.reset()
