"""Mixtures of experts as parts of a whole decoder."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backends.blocks import checkpoint_activations
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import AdamW
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.experts import MixtureOfExperts
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from modelzoo_trainer.zoo.models.gptj import GptJ
from modelzoo_trainer.zoo.models.routing import load_balancing_loss

VOCAB, LENGTH = 50, 6
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "load_balancing_loss_coef": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "two of four": {"moe": MOE},
    "swiglu, shared": {"moe": {**MOE, "num_shared_experts": 1}, "nonlinearity": "swiglu"},
    "null expert": {"moe": {"num_experts": 3, "null_expert_bias": 1.1}},
    "hash": {"moe": {"num_experts": 3, "routing_algorithm": "hash"}},
    "gptj": {"kind": GptJ, "moe": MOE, "rotary_dim": 4},
}
ROTARY = {"position_embedding_type": "rotary", "rotary_dim": 4}
OF_OPTIONS = pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)


def make(kind: type[Decoder] = Gpt2, **changes: Any) -> Decoder:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "max_position_embeddings": LENGTH,
        "num_hidden_layers": 2,
        "dropout_rate": 0.0,
        "embedding_dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "num_heads": 2,
        "filter_size": 24,
        "initializer_range": 0.3,
    }
    return kind(**{**settings, **changes})


def batch_of(size: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids, labels = torch.randint(VOCAB, (2, size, LENGTH), generator=generator, dtype=torch.int32)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def cross_entropy(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    scores, counted = model.logits(batch["input_ids"]), batch["attention_mask"] == 1
    return functional.cross_entropy(scores[counted], batch["labels"][counted].long())


@pytest.mark.parametrize("over", ["sequence", "batch"])
@pytest.mark.parametrize("kind", [Gpt2, GptJ])
def test_the_balancing_loss_is_added_in_training_only(kind: type[Decoder], over: Any) -> None:
    model = make(kind, **ROTARY, moe={**MOE, "load_balancing_loss_over": over})
    batch = batch_of()
    routings = []
    for layer in model.layers:
        layer.ffn.register_forward_hook(lambda _, given, found: routings.append(found[1]))

    in_training = model(batch)["loss"]
    in_evaluation = model.eval()(batch)["loss"]

    expected = cross_entropy(model, batch)
    torch.testing.assert_close(in_evaluation, expected)
    balance = load_balancing_loss(
        [routing.shares for routing in routings[:2]],
        [routing.probabilities for routing in routings[:2]],
        batch["attention_mask"],
        over,
    )
    assert balance > 1
    torch.testing.assert_close(in_training, expected + 0.5 * balance)


def test_the_shares_of_experts_are_those_of_the_counted_tokens() -> None:
    model, batch = make(moe=MOE), batch_of()
    chosen = []
    for layer in model.layers:
        layer.ffn.register_forward_hook(lambda _, given, found: chosen.append(found[1]))

    outputs = model(batch)

    counted = batch["attention_mask"] == 1
    uses = [functional.one_hot(one.ids[counted], 4).sum(1).float() for one in chosen]
    expected = torch.stack([one.mean(0) / 2 for one in uses])
    torch.testing.assert_close(outputs["expert_shares"], expected)
    assert not outputs["expert_shares"].requires_grad
    difference = outputs["loss"] - cross_entropy(model, batch)
    torch.testing.assert_close(difference, 0.5 * outputs["load_balancing_loss"])
    assert not {"expert_shares", "load_balancing_loss"} & model.eval()(batch).keys()


def test_a_layer_without_mask_counts_all_tokens() -> None:
    model, batch = make(moe=MOE), batch_of()
    ones = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    del batch["attention_mask"]

    torch.testing.assert_close(model(batch)["loss"], model(ones)["loss"])


@pytest.mark.parametrize("kind", [Gpt2, GptJ])
def test_a_layer_adds_the_experts_to_the_residual(kind: type[Decoder]) -> None:
    model = make(kind, **ROTARY, moe={**MOE, "routing_algorithm": "learned"}).eval()
    ids = batch_of()["input_ids"]
    plain = make(kind, **ROTARY).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    for layer, own in zip(plain.layers, model.layers, strict=True):
        layer.ffn = Alone(own.ffn, ids)

    torch.testing.assert_close(model.logits(ids), plain.logits(ids))


class Alone(nn.Module):
    """The output of a mixture without its routing."""

    def __init__(self, mixture: MixtureOfExperts, ids: Tensor) -> None:
        super().__init__()
        self.mixture, self.ids = mixture, ids

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mixture(hidden, self.ids, None)[0]


@OF_OPTIONS
def test_every_parameter_gets_a_gradient(changes: dict[str, Any]) -> None:
    model = make(**changes)

    model(batch_of())["loss"].backward()

    assert [name for name, param in model.named_parameters() if param.grad is None] == []


@OF_OPTIONS
@pytest.mark.slow_cases(every=4)
def test_it_runs_on_meta_and_starts_like_one_that_was_built_in_place(
    changes: dict[str, Any],
) -> None:
    with torch.device("meta"):
        moved = make(**changes)
        batch = {key: one.to("meta") for key, one in batch_of().items()}
        moved(batch)["loss"].backward()
    moved.to_empty(device="cpu")
    for param in moved.parameters():
        nn.init.constant_(param, math.nan)
    torch.manual_seed(7)
    moved.reset_parameters()
    built = make(**changes)
    torch.manual_seed(7)
    built.reset_parameters()

    for name, param in built.named_parameters():
        assert torch.equal(param, moved.get_parameter(name)), name


def test_initializers_of_experts_and_routers() -> None:
    moe = {**MOE, "gate_initializer": {"name": "constant", "val": 0.5}}
    model = make(moe=moe, mup_base_hidden_size=4, mup_base_filter_size=6, filter_size=600)
    experts = model.layers[0].ffn.experts

    assert torch.equal(model.layers[0].ffn.router.weight, torch.full((4, 16), 0.5))
    assert experts.up.std().item() == pytest.approx(0.88 * 0.3 * 4**-0.5, rel=0.05)
    depth, ratio = 4**-0.5, 100**-0.5
    assert experts.down.std().item() == pytest.approx(0.88 * 0.3 * depth * ratio, rel=0.05)
    with pytest.warns(UserWarning, match="gate_initializer"):
        other = make(moe=moe, initializer={"name": "constant", "val": 0.25})
    assert torch.equal(other.layers[0].ffn.router.weight, torch.full((4, 16), 0.25))
    gptj = make(GptJ, rotary_dim=4, moe=moe, initializer={"name": "constant", "val": 0.25})
    assert torch.equal(gptj.layers[0].ffn.router.weight, torch.full((4, 16), 0.5))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_neither_loss_nor_gradients(mode: Any) -> None:
    def found(model: Decoder) -> list[Tensor]:
        torch.manual_seed(5)
        loss = model(batch_of())["loss"]
        loss.backward()
        return [loss, *(param.grad for param in model.parameters())]

    changes = {"moe": MOE, "dropout_rate": 0.2, "attention_dropout_rate": 0.1}
    expected, model = found(make(**changes)), make(**changes)
    checkpoint_activations(model, mode)

    assert all(map(torch.equal, found(model), expected))


@pytest.mark.slow
@OF_OPTIONS
def test_it_compiles_into_one_graph(changes: dict[str, Any]) -> None:
    model, batch = make(**changes), batch_of()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def found(of: Any) -> list[Tensor]:
        loss = of(batch)["loss"]
        return [loss, *torch.autograd.grad(loss, model.parameters())]

    torch.testing.assert_close(found(compiled), found(model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_equal_layers_are_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = make(moe=MOE, num_hidden_layers=5)
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        model(batch_of())["loss"].backward()

    assert counter.frame_count == 1


def test_a_mixture_generates() -> None:
    model = make(moe=MOE)
    assert model.generate(batch_of()["input_ids"][:, :2], 3).shape == (3, 5)


# ---- settings


def test_both_names_of_the_setting() -> None:
    model = make(moe_params=MOE)
    assert (model.moe, model.moe_params) == (MOE, None)
    assert isinstance(model.layers[0].ffn, MixtureOfExperts)
    with pytest.raises(ConfigError, match=r"moe_params and moe are both given"):
        make(moe=MOE, moe_params=MOE)


@pytest.mark.parametrize("off", [None, {}, {"num_experts": 1}, {"num_experts": 0}])
def test_fewer_than_two_experts_are_none(off: Any) -> None:
    plain, model = make(), make(moe=off)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model(batch_of())["loss"], plain(batch_of())["loss"])
    assert model.tensor_plan == plain.tensor_plan


def test_what_is_wrong_is_refused_before_the_model_is_built() -> None:
    with pytest.raises(ConfigError, match=r"moe.top_k is 3, but moe.num_experts is 2"):
        Gpt2.check_arguments(moe={"num_experts": 2, "top_k": 3})
    with pytest.raises(ConfigError, match=r"moe.gate_initializer.*'normal'"):
        Gpt2.check_arguments(moe={**MOE, "gate_initializer": "norml"})


def test_a_check_does_not_warn_of_what_the_constructor_warns_of(recwarn: Any) -> None:
    arguments = {"moe": {**MOE, "sinkhorn_n_iters": 3}}
    Gpt2.check_arguments(**arguments)
    assert not recwarn
    with pytest.warns(UserWarning, match="sinkhorn_n_iters"):
        make(**arguments)


def test_the_tensor_plan_leaves_experts_whole() -> None:
    plan = make(moe=MOE, nonlinearity="swiglu").tensor_plan
    assert not [pattern for pattern in plan if "ffn" in pattern]
    assert plan["layers.*.attention.q_proj"] == "colwise"


def test_a_learning_rate_group_may_have_patterns_without_a_match() -> None:
    model = make(moe=MOE, mup_base_hidden_size=4, mup_base_filter_size=6)
    names = {param: name for name, param in model.named_parameters()}

    optimizer = AdamW(model, learning_rate=0.1, adjust_learning_rate={"decoder_kernel": 0.5})

    factors = {
        names[param]: group.get("adjust_learning_rate", group["lr"] / 0.1)
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert factors["layers.0.attention.q_proj.weight"] == pytest.approx(0.5)
    assert factors["layers.0.ffn.experts.up"] == pytest.approx(1)


def test_the_scale_of_logits_without_mup() -> None:
    ids = batch_of()["input_ids"]
    scaled, plain = make(output_logits_scale=0.25), make()
    torch.testing.assert_close(scaled.logits(ids), plain.logits(ids) / 4)
    with pytest.warns(UserWarning, match="output_logits_scale"):
        make(output_logits_scale=0.25, mup_base_hidden_size=4, mup_base_filter_size=6)
