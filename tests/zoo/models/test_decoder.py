"""The complete decoder: outputs, causality, tied weights, devices, initialization, generation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from tests.zoo.models.llama_settings import LLAMA

VOCAB, LENGTH = 50, 12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make(kind: type[Decoder] = Gpt2, **changes: Any) -> Decoder:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": LENGTH,
        "num_hidden_layers": 2,
        "dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "num_heads": 4,
        "filter_size": 64,
    }
    return kind(**{**settings, **changes})


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, dtype=torch.int32)


def batch_of(size: int = 3, length: int = LENGTH) -> dict[str, Tensor]:
    return {"input_ids": tokens(size, length), "labels": tokens(size, length)}


VARIANTS = pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Gpt2, {}),
        (Gpt2, {"position_embedding_type": "rotary", "rotary_dim": 4}),
        (Gpt2, {"position_embedding_type": None, "embedding_layer_norm": True}),
        (Gpt2, {"nonlinearity": "squared_relu", "norm_type": "biasless-layernorm"}),
        (Gpt2, {"nonlinearity": "liglu", "norm_type": "nonparametric-layernorm"}),
        (Gpt2, LLAMA),
        (
            Gpt2,
            {
                **LLAMA,
                "attention_module": "multiquery_attention",
                "extra_attention_params": {"num_kv_groups": 2},
                "pos_scaling_type": "llama3",
                "pos_scaling_factor": 8.0,
                "pos_scaling_extra_args": {"original_max_position_embeddings": 8},
            },
        ),
        (Gpt2, {"mup_base_hidden_size": 16, "mup_base_filter_size": 32, "embeddings_scale": 10}),
    ],
)


@VARIANTS
def test_the_output_has_loss_logits_and_the_number_of_tokens(
    kind: type[Decoder], changes: dict[str, Any]
) -> None:
    model = make(kind, **changes)
    batch = batch_of()

    alone = model(batch)
    model.requested_outputs = ("logits",)
    outputs = model(batch)

    assert sorted(alone) == ["loss", "num_items"]
    torch.testing.assert_close(alone["loss"], outputs["loss"], rtol=1e-6, atol=0)
    assert outputs["loss"].shape == ()
    assert outputs["loss"].dtype == torch.float32
    assert outputs["logits"].shape == (3, LENGTH, VOCAB)
    assert outputs["num_items"] == 3 * LENGTH
    assert sorted(outputs) == ["logits", "loss", "num_items"]


@VARIANTS
def test_every_parameter_gets_a_gradient(kind: type[Decoder], changes: dict[str, Any]) -> None:
    model = make(kind, **changes)

    model(batch_of())["loss"].backward()

    assert [name for name, param in model.named_parameters() if param.grad is None] == []


@VARIANTS
def test_a_later_token_does_not_change_earlier_logits(
    kind: type[Decoder], changes: dict[str, Any]
) -> None:
    model = make(kind, **changes).eval()
    before = tokens(1, LENGTH)
    after = before.clone()
    after[0, 7] = (after[0, 7] + 1) % VOCAB

    first, second = model.logits(before), model.logits(after)

    torch.testing.assert_close(first[:, :7], second[:, :7], rtol=0, atol=1e-6)
    assert (first[:, 7:] - second[:, 7:]).abs().amax(dim=-1).min() > 1e-4


@VARIANTS
@pytest.mark.slow_cases(every=4)
def test_forward_and_backward_run_on_the_meta_device(
    kind: type[Decoder], changes: dict[str, Any]
) -> None:
    with torch.device("meta"):
        model = make(kind, **changes)
        batch = {**batch_of(), "attention_mask": torch.ones(3, LENGTH, dtype=torch.int32)}
        outputs = model(batch)
        outputs["loss"].backward()

    assert outputs["num_items"].device.type == "meta"
    assert {param.grad.device.type for param in model.parameters()} == {"meta"}  # type: ignore[union-attr]


@VARIANTS
@pytest.mark.slow_cases(every=4)
def test_a_model_from_the_meta_device_starts_like_one_that_was_built_in_place(
    kind: type[Decoder], changes: dict[str, Any]
) -> None:
    with torch.device("meta"):
        moved = make(kind, **changes)
    moved.to_empty(device="cpu")
    torch.manual_seed(7)
    moved.reset_parameters()
    built = make(kind, **changes)
    torch.manual_seed(7)
    built.reset_parameters()

    expected = built.state_dict()

    assert moved.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in moved.state_dict().items())
    assert (moved.lm_head.weight is moved.token_embeddings.weight) == moved.share_embedding_weights


@pytest.mark.parametrize("changes", [{}, LLAMA])
def test_the_first_loss_is_that_of_guessing(changes: dict[str, Any]) -> None:
    model = make(**{**changes, "vocab_size": 1000, "initializer_range": 0.02})
    batch = {key: torch.randint(1000, (8, LENGTH)) for key in ("input_ids", "labels")}

    loss = model(batch)["loss"].item()

    assert loss == pytest.approx(math.log(1000), abs=0.1)


def test_shared_embeddings_are_one_parameter() -> None:
    model = make(share_embedding_weights=True)

    assert model.lm_head.weight is model.token_embeddings.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_separate_embeddings_are_two_parameters() -> None:
    model = make(share_embedding_weights=False)

    assert model.lm_head.weight is not model.token_embeddings.weight
    assert "lm_head.weight" in dict(model.named_parameters())


@pytest.mark.slow
def test_training_learns_a_batch_by_heart() -> None:
    model = make(position_embedding_type="rotary")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = batch_of(2)
    for _ in range(60):
        model(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    assert model.eval()(batch)["accuracy"] == 1


def test_the_mask_decides_what_counts_for_the_loss_and_not_what_is_attended_to() -> None:
    model = make()
    batch = batch_of(2)
    mask = torch.zeros(2, LENGTH, dtype=torch.int32)
    mask[:, 5:9] = 1

    alone = model({**batch, "attention_mask": mask})
    model.requested_outputs = ("logits",)
    outputs = model({**batch, "attention_mask": mask})

    torch.testing.assert_close(alone["loss"], outputs["loss"], rtol=1e-6, atol=0)
    logits = model.logits(batch["input_ids"])
    expected = functional.cross_entropy(
        logits[:, 5:9].reshape(-1, VOCAB), batch["labels"][:, 5:9].reshape(-1).long()
    )
    torch.testing.assert_close(outputs["loss"], expected)
    torch.testing.assert_close(outputs["logits"], logits)
    assert outputs["num_items"].item() == 8


def test_dropout_acts_in_training_only() -> None:
    model = make(dropout_rate=0.5)
    ids = tokens(1, LENGTH)

    in_training = [model.logits(ids) for _ in range(2)]
    model.eval()
    in_eval = [model.logits(ids) for _ in range(2)]

    assert not torch.equal(*in_training)
    assert torch.equal(*in_eval)


@pytest.mark.parametrize("rate", ["embedding_dropout_rate", "attention_dropout_rate"])
def test_a_dropout_rate_of_its_own_replaces_the_common_one(rate: str) -> None:
    changes: dict[str, Any] = {rate: 0.5}
    model = make(**changes)
    ids = tokens(1, LENGTH)

    assert not torch.equal(model.logits(ids), model.logits(ids))


def test_accuracy_is_part_of_the_output_in_eval_mode_only() -> None:
    model = make()

    outputs = model.eval()(batch_of())

    assert outputs["accuracy"].shape == ()
    assert "accuracy" not in model.train()(batch_of())


def test_accuracy_can_be_switched_off() -> None:
    assert "accuracy" not in make(compute_eval_metrics=False).eval()(batch_of())


def test_the_projections_that_add_to_the_residual_start_smaller_with_depth() -> None:
    model = make(hidden_size=128, num_hidden_layers=8, initializer_range=0.1)
    layer: Any = model.layers[3]

    inside = layer.attention.q_proj.weight.std().item()
    outgoing = layer.attention.o_proj.weight.std().item()

    # A normal distribution that is cut at two deviations keeps 0.88 of its deviation.
    assert inside == pytest.approx(0.088, rel=0.03)
    assert outgoing == pytest.approx(0.088 / math.sqrt(16), rel=0.03)
    assert layer.ffn.down_proj.bias.abs().max() == 0


def test_a_llama_has_no_bias_anywhere() -> None:
    names = [name for name, _ in make(**LLAMA).named_parameters()]

    assert [name for name in names if "bias" in name] == []


def test_bfloat16_autocast_gives_a_float32_loss() -> None:
    model = make(**LLAMA)
    batch = batch_of()

    with torch.autocast("cpu", torch.bfloat16):
        alone = model(batch)
        model.requested_outputs = ("logits",)
        outputs = model(batch)

    assert alone["loss"].dtype == torch.float32
    torch.testing.assert_close(alone["loss"], outputs["loss"], rtol=1e-4, atol=0)
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["loss"].dtype == torch.float32


def test_too_long_a_sequence_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_position_embeddings is 12, but .* has 13 tokens"):
        make()(batch_of(1, LENGTH + 1))


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['input_ids', 'tokens'\], but requires .*'labels'"):
        make()({"input_ids": tokens(1, 4), "tokens": tokens(1, 4)})


def test_a_loss_weight_without_effect_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"loss_weight \(0.5\) has no effect"):
        make(loss_weight=0.5)


def test_generate_adds_the_requested_tokens_after_the_given_ones() -> None:
    model = make()
    start = tokens(2, 3)

    made = model.generate(start, 20)  # goes beyond the context of 12

    assert made.shape == (2, 23)
    assert made.dtype == start.dtype
    assert torch.equal(made[:, :3], start)
    assert not made.requires_grad


def test_generate_depends_on_its_generator_only() -> None:
    model = make()
    start = tokens(1, 3)

    first = model.generate(start, 30, generator=torch.Generator().manual_seed(5))
    torch.rand(1)
    second = model.generate(start, 30, generator=torch.Generator().manual_seed(5))
    other = model.generate(start, 30, generator=torch.Generator().manual_seed(6))

    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_generate_at_temperature_0_takes_the_likeliest_token() -> None:
    model = make().eval()
    start = tokens(1, 3)

    made = model.generate(start, 4, temperature=0)

    likeliest = model.logits(made[:, :-1]).argmax(dim=-1)
    assert torch.equal(made[0, 3:].long(), likeliest[0, 2:])


def test_generate_keeps_to_the_likeliest_k() -> None:
    model = make()
    start = tokens(1, 3)

    made = model.generate(start, 8, top_k=1)

    assert torch.equal(made, model.generate(start, 8, temperature=0))


def test_generate_leaves_the_mode_as_it_was() -> None:
    model = make(dropout_rate=0.5).train()
    with pytest.raises(ConfigError):
        model.generate(tokens(1, 3), -1)
    model.generate(tokens(1, 3), 2)

    assert model.training
    assert model.layers[0].training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0, got -1"),
        ({"max_new_tokens": 1, "temperature": -0.5}, "temperature: .* >= 0, got -0.5"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k: expected an integer > 0 or null, got 0"),
    ],
)
def test_generate_refuses_what_is_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().generate(tokens(1, 3), **arguments)


def test_generate_refuses_an_empty_beginning() -> None:
    with pytest.raises(ConfigError, match=r"shape \(1, 0\)"):
        make().generate(tokens(1, 0), 3)


def test_the_module_can_be_copied_and_loaded_back() -> None:
    import copy

    model = make(**LLAMA)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.lm_head.weight)
    twin.load_state_dict(model.state_dict())
    ids = tokens(1, 4)

    assert torch.equal(model.logits(ids), twin.logits(ids))
