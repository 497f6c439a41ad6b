"""Mixture of experts against the explicit sum over the experts of each token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.experts import MixtureOfExperts
from modelzoo_trainer.zoo.models.feed_forward import GATED, FeedForward
from modelzoo_trainer.zoo.models.initializers import read_initializer
from modelzoo_trainer.zoo.models.moe_settings import read_moe, warn_of_unused
from modelzoo_trainer.zoo.models.routing import load_balancing_loss

B, T, H, F = 3, 5, 6, 10
COUNTED = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make(
    nonlinearity: Any = "swiglu", use_bias: bool = True, dropout: float = 0.0, **moe: Any
) -> MixtureOfExperts:
    """Return a mixture in double precision with random weights and biases."""
    given = {"num_experts": 4, "load_balancing_loss_coef": 0.01, **moe}
    model = MixtureOfExperts(read_moe(given), H, F, nonlinearity, use_bias, dropout).double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.5)
    return model


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, H, dtype=torch.float64), torch.randint(50, (B, T), dtype=torch.int32)


def expert(model: MixtureOfExperts, number: int) -> FeedForward:
    """Return one expert as an ordinary feed-forward network."""
    own = model.experts
    is_gated = own.gate is not None
    kind = "swiglu" if is_gated else "gelu"
    found = FeedForward(H, F, kind, own.up_bias is not None).double()
    found.activation = own.activation
    with torch.no_grad():
        for name, layer in (("up", "up_proj"), ("gate", "gate_proj"), ("down", "down_proj")):
            if getattr(own, name) is not None:
                getattr(found, layer).weight.copy_(getattr(own, name)[number])
                if own.up_bias is not None:
                    getattr(found, layer).bias.copy_(getattr(own, f"{name}_bias")[number])
    return found


def function(name: str, scores: Tensor, num_iters: int) -> Tensor:
    """Return the nonlinearity of all scores, (B, T, E), in plain formulas."""
    if name == "softmax":
        return scores.exp() / scores.exp().sum(-1, keepdim=True)
    if name == "sigmoid":
        return 1 / (1 + (-scores).exp())
    found = scores.exp()
    for _ in range(num_iters):
        found = found / found.sum(-1, keepdim=True)
        found = found / found.sum(1, keepdim=True)
    return found


def chosen_experts(
    model: MixtureOfExperts, hidden: Tensor, ids: Tensor
) -> list[list[list[tuple[int, float]]]]:
    """Return the experts of each token with their weights, by the published rules."""
    moe = model.settings
    if moe.routing_algorithm == "hash":
        return [[[(int(one) % moe.num_experts, 1.0)] for one in row] for row in ids]
    if moe.routing_algorithm == "uniform":
        row = [
            [((t + j) % moe.num_experts, 1 / moe.top_k) for j in range(moe.top_k)] for t in range(T)
        ]
        return [row] * B
    scores = hidden @ model.router.weight.T
    if model.router.bias is not None:
        scores = scores + model.router.bias
    by = function(moe.router_selection_nonlinearity, scores, moe.sinkhorn_n_iters)
    weights = function(moe.expert_weighting_nonlinearity, scores, moe.sinkhorn_n_iters)
    found = []
    for b in range(B):
        found.append([])
        for t in range(T):
            order = sorted(range(moe.num_experts), key=lambda e, b=b, t=t: -by[b, t, e].item())
            best = order[: moe.top_k]
            total = 1.0
            if moe.expert_weighting_normalization:
                total = sum(weights[b, t, e].item() for e in best) + moe.null_expert_bias
            found[b].append([(e, weights[b, t, e].item() / total) for e in best])
    return found


def explicit(model: MixtureOfExperts, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the sum over the chosen and the shared experts of each token."""
    moe = model.settings
    networks = [expert(model, number) for number in range(moe.num_in_all)]
    routed = chosen_experts(model, hidden, ids)
    result = torch.zeros_like(hidden)
    for b in range(B):
        for t in range(T):
            for e, weight in routed[b][t]:
                if moe.probability_before_ffn:
                    result[b, t] += networks[e](weight * hidden[b, t])
                else:
                    result[b, t] += weight * networks[e](hidden[b, t])
            for network in networks[moe.num_experts :]:
                result[b, t] += network(hidden[b, t])
    return result


CASES: dict[str, dict[str, Any]] = {
    "top 1": {},
    "top 2": {"top_k": 2},
    "all": {"top_k": 4},
    "not normalized": {"top_k": 2, "expert_weighting_normalization": False},
    "null expert": {"null_expert_bias": 1.1},
    "null expert, top 2": {"null_expert_bias": 0.3, "top_k": 2},
    "shared": {"num_shared_experts": 1, "null_expert_bias": 1.1},
    "two shared, top 3": {"num_shared_experts": 2, "top_k": 3},
    "one expert and a shared one": {"num_experts": 1, "num_shared_experts": 1},
    "bias": {"router_use_bias": True, "top_k": 2},
    "sigmoid": {
        "router_selection_nonlinearity": "sigmoid",
        "expert_weighting_nonlinearity": "sigmoid",
        "top_k": 2,
    },
    "weights by sigmoid": {"expert_weighting_nonlinearity": "sigmoid", "top_k": 2},
    "sinkhorn": {
        "router_selection_nonlinearity": "sinkhorn",
        "sinkhorn_n_iters": 3,
        "top_k": 2,
        "load_balancing_loss_coef": 0,
    },
    "before": {"probability_before_ffn": True, "top_k": 2, "num_shared_experts": 1},
    "in the computation's type": {"router_fp32": False, "top_k": 2},
    "hash": {"routing_algorithm": "hash", "load_balancing_loss_coef": 0},
    "uniform": {"routing_algorithm": "uniform", "top_k": 3, "load_balancing_loss_coef": 0},
    "uniform, before": {
        "routing_algorithm": "uniform",
        "top_k": 2,
        "probability_before_ffn": True,
        "load_balancing_loss_coef": 0,
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow_cases(every=4)
def test_the_output_is_the_sum_over_the_experts_of_each_token(name: str) -> None:
    model = make(**CASES[name])
    hidden, ids = inputs()

    output, _ = model(hidden, ids, COUNTED)

    torch.testing.assert_close(output, explicit(model, hidden, ids), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("nonlinearity", ["geglu", "gelu", "squared_relu"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_experts_are_feed_forward_networks(nonlinearity: Any, use_bias: bool) -> None:
    model = make(nonlinearity, use_bias, top_k=2)
    hidden, ids = inputs()

    output, _ = model(hidden, ids, None)

    assert (model.experts.gate is not None) == (nonlinearity in GATED)
    torch.testing.assert_close(output, explicit(model, hidden, ids), rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_explicit_sum() -> None:
    model = make(top_k=2, num_shared_experts=1, null_expert_bias=0.2, router_use_bias=True)
    hidden, ids = inputs()
    params = dict(model.named_parameters())

    def loss(*values: Tensor) -> Tensor:
        given = dict(zip(params, values[1:], strict=True))
        output, routing = torch.func.functional_call(model, given, (values[0], ids, COUNTED))
        return output.square().sum() + (routing.probabilities * routing.shares).sum()

    assert torch.autograd.gradcheck(
        loss, (hidden.requires_grad_(), *params.values()), fast_mode=True
    )


def test_every_parameter_gets_a_gradient_also_of_experts_that_no_token_uses() -> None:
    model = make(num_experts=4, top_k=1, null_expert_bias=1.0)
    hidden, ids = inputs()

    output, routing = model(hidden[:1, :1], ids[:1, :1], None)
    output.sum().backward()

    idle = routing.shares[0] == 0
    assert idle.sum() == 3
    assert model.experts.up.grad[idle].count_nonzero() == 0
    assert model.experts.up.grad[~idle].count_nonzero() > 0
    assert all(param.grad is not None for param in model.parameters())
    assert model.router.weight.grad.count_nonzero() > 0


def test_each_expert_has_its_own_dropout() -> None:
    model = make(dropout=0.5, use_bias=False, top_k=2, num_shared_experts=1)
    hidden, ids = inputs()
    seen = []
    model.experts.dropout.register_forward_hook(lambda _, given, found: seen.append(found == 0))

    in_training, _ = model(hidden, ids, None)
    in_evaluation, _ = model.eval()(hidden, ids, None)

    (dropped, kept) = seen
    assert dropped.shape == (3 * B * T, H)
    assert 0.35 < dropped.float().mean() < 0.65
    patterns = dropped.view(3, -1)
    assert not torch.equal(patterns[0], patterns[1])
    assert not torch.equal(patterns[0], patterns[2])
    assert not kept.any()
    assert not torch.equal(in_training, in_evaluation)


# ---- what is counted


def test_shares_and_probabilities_are_of_the_counted_tokens_of_each_sequence() -> None:
    model = make(top_k=2)
    hidden, ids = inputs()

    _, routing = model(hidden, ids, COUNTED)

    by = function("softmax", hidden @ model.router.weight.T, 1)
    for b in range(B):
        tokens = [t for t in range(T) if COUNTED[b, t]]
        routed = chosen_experts(model, hidden, ids)[b]
        for e in range(4):
            share = sum(e in [one for one, _ in routed[t]] for t in tokens) / len(tokens)
            assert routing.shares[b, e].item() == pytest.approx(share)
            mean = sum(by[b, t, e].item() for t in tokens) / len(tokens)
            assert routing.probabilities[b, e].item() == pytest.approx(mean, rel=1e-6)
    assert routing.shares.sum(-1).tolist() == pytest.approx([2.0] * B)


def test_a_sequence_without_counted_tokens_adds_nothing() -> None:
    _, routing = make()(*inputs(), torch.zeros(B, T))

    assert routing.shares.count_nonzero() == 0
    assert routing.probabilities.count_nonzero() == 0


def test_the_loss_is_the_mean_over_sequences_with_counted_tokens() -> None:
    shares, probabilities = layers()
    counted = torch.ones(B, T)
    counted[1] = 0
    for one in (*shares, *probabilities):
        one[1] = 0
    kept = [[one[[0, 2]] for one in values] for values in (shares, probabilities)]

    loss = load_balancing_loss(shares, probabilities, counted, "sequence")

    assert loss.item() == pytest.approx(load_balancing_loss(*kept, None, "sequence").item())


def layers(num: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    shares = [torch.rand(B, 4, dtype=torch.float64) for _ in range(num)]
    return shares, [torch.rand(B, 4, dtype=torch.float64) for _ in range(num)]


def test_the_loss_over_sequences() -> None:
    shares, probabilities = layers()
    total = 0.0
    for b in range(B):
        for e in range(4):
            share = sum(one[b, e].item() for one in shares) / 2
            total += share * sum(one[b, e].item() for one in probabilities) / 2

    loss = load_balancing_loss(shares, probabilities, COUNTED, "sequence")

    assert loss.item() == pytest.approx(4 * 4 * total / (B * 4))


def test_the_loss_over_a_batch_weights_sequences_by_their_tokens() -> None:
    shares, probabilities = layers()
    num = [4, 1, 5]
    total = 0.0
    for e in range(4):
        share = sum(num[b] * one[b, e].item() for b in range(B) for one in shares) / 20
        total += share * sum(num[b] * p[b, e].item() for b in range(B) for p in probabilities) / 20

    loss = load_balancing_loss(shares, probabilities, COUNTED, "batch")

    assert loss.item() == pytest.approx(4 * total)
    alike = load_balancing_loss(shares, probabilities, None, "batch")
    ones = load_balancing_loss(shares, probabilities, torch.ones(B, T), "batch")
    assert alike.item() == pytest.approx(ones.item())


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_the_loss_of_equal_use_is_top_k_and_is_defined_without_counted_tokens(over: Any) -> None:
    shares, probabilities = [torch.full((B, 4), 2 / 4)], [torch.full((B, 4), 1 / 4)]

    assert load_balancing_loss(shares, probabilities, None, over).item() == pytest.approx(2)
    nothing = [torch.zeros(B, 4)]
    assert load_balancing_loss(nothing, nothing, torch.zeros(B, T), over).item() == 0


# ---- precision


def test_scores_are_float32_in_autocast_only_with_router_fp32() -> None:
    hidden, ids = torch.randn(B, T, H), inputs()[1]
    precise, fast = make().float(), make(router_fp32=False).float()
    fast.load_state_dict(precise.state_dict())

    expected = precise(hidden, ids, None)[1]
    with torch.autocast("cpu", torch.bfloat16):
        output, found = precise(hidden, ids, None)
        _, rounded = fast(hidden, ids, None)

    assert output.dtype == torch.bfloat16
    assert torch.equal(found.probabilities, expected.probabilities)
    assert found.weights.dtype == rounded.weights.dtype == torch.float32
    assert not torch.equal(rounded.probabilities, expected.probabilities)
    torch.testing.assert_close(rounded.probabilities, expected.probabilities, rtol=0.05, atol=0.01)


def test_weights_in_bfloat16_have_routing_in_float32() -> None:
    model = make(top_k=2).to(torch.bfloat16)
    hidden, ids = torch.randn(B, T, H, dtype=torch.bfloat16), inputs()[1]

    output, routing = model(hidden, ids, None)

    assert output.dtype == torch.bfloat16
    assert routing.weights.dtype == routing.probabilities.dtype == torch.float32


def test_probabilities_that_underflow_leave_weights_finite() -> None:
    model = make(router_selection_nonlinearity="sigmoid", expert_weighting_nonlinearity="sigmoid")
    hidden, ids = torch.ones(B, T, H), inputs()[1]
    model.float()
    with torch.no_grad():
        model.router.weight.fill_(-1000.0)

    output, routing = model(hidden, ids, None)

    assert routing.weights.isfinite().all()
    assert output.isfinite().all()


# ---- initialization


def test_experts_start_one_by_one_with_the_fans_of_a_matrix() -> None:
    model = make(use_bias=True, router_use_bias=True, num_shared_experts=1)
    gate = read_initializer("gate", "normal")
    inner = read_initializer("inner", {"name": "kaiming_normal", "mode": "fan_in"})
    outer = read_initializer("outer", "xavier_uniform")
    torch.manual_seed(3)
    model.draw(gate, inner, outer)
    torch.manual_seed(3)
    expected = [torch.empty(4, H, dtype=torch.float64)]
    gate(expected[0])
    for number in range(5):
        up, glu = torch.empty(2, F, H, dtype=torch.float64)
        down = torch.empty(H, F, dtype=torch.float64)
        inner(up), inner(glu), outer(down)
        expected += [up, glu, down]
        assert torch.equal(model.experts.up[number], up)
        assert torch.equal(model.experts.gate[number], glu)
        assert torch.equal(model.experts.down[number], down)
    assert torch.equal(model.router.weight, expected[0])
    assert model.experts.down.abs().max() <= math.sqrt(6 / (H + F))
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    assert len(biases) == 4
    assert not any(bias.count_nonzero() for bias in biases)


# ---- graphs and devices


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "sinkhorn", "before", "hash", "uniform"])
def test_a_mixture_compiles_into_one_graph(name: str) -> None:
    model = make(**CASES[name])
    hidden, ids = inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def gradients(of: Any) -> tuple[Tensor, ...]:
        output, routing = of(hidden, ids, COUNTED)
        balance = 0 if routing.probabilities is None else routing.probabilities.square().sum()
        return output, *torch.autograd.grad(output.square().sum() + balance, model.parameters())

    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        for found, expected in zip(gradients(compiled), gradients(model), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow_cases(every=4)
def test_a_mixture_runs_on_meta(name: str) -> None:
    model = make(**CASES[name]).to("meta")
    hidden, ids = inputs()

    output, routing = model(hidden.to("meta"), ids.to("meta"), COUNTED.to("meta"))
    (output.sum() + routing.weights.sum()).backward()

    assert output.shape == hidden.shape
    assert routing.shares.shape == (B, model.settings.num_experts)


# ---- settings


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"topk": 2}, ("moe.topk", "'top_k'")),
        ({"top_k": 5}, ("moe.top_k is 5", "moe.num_experts is 4")),
        ({"top_k": 0}, ("moe.top_k", "> 0", "0")),
        ({"num_shared_experts": 0}, ("moe.num_shared_experts", "> 0", "0")),
        ({"num_experts": 0, "num_shared_experts": 2}, ("moe.num_experts is 0",)),
        ({"num_experts": 2.5}, ("moe.num_experts", "an integer", "2.5")),
        ({"routing_algorithm": "random"}, ("moe.routing_algorithm", "'random'", "hash")),
        ({"routing_algorithm": "hash", "top_k": 2}, ("moe.top_k is 2", "hash")),
        (
            {"routing_algorithm": "hash", "num_shared_experts": 1},
            ("moe.num_shared_experts", "learned", "'hash'"),
        ),
        (
            {"routing_algorithm": "uniform", "load_balancing_loss_coef": 0.1},
            ("moe.load_balancing_loss_coef", "0.1", "'uniform'"),
        ),
        (
            {"router_selection_nonlinearity": "sinkhorn", "load_balancing_loss_coef": 0.1},
            ("moe.load_balancing_loss_coef", "0.1", "sinkhorn"),
        ),
        ({"expert_weighting_nonlinearity": "sinkhorn"}, ("moe.expert_weighting_nonlinearity",)),
        (
            {"null_expert_bias": 0.5, "expert_weighting_normalization": False},
            ("moe.null_expert_bias", "0.5", "expert_weighting_normalization"),
        ),
        ({"null_expert_bias": -1.0}, ("moe.null_expert_bias", ">= 0", "-1")),
        ({"load_balancing_loss_over": "epoch"}, ("moe.load_balancing_loss_over", "'epoch'")),
    ],
)
def test_what_contradicts_is_refused(given: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_moe({"num_experts": 4, **given})
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"load_balancing_loss_coef": 0.0}, ("moe.top_k is 1", "not", "null_expert_bias")),
        ({"top_k": 2, "sinkhorn_n_iters": 3}, ("moe.sinkhorn_n_iters", "no effect")),
        (
            {"routing_algorithm": "hash", "router_use_bias": True, "null_expert_bias": 1.0},
            ("moe.router_use_bias", "moe.null_expert_bias", "no effect"),
        ),
        ({"top_k": 2, "load_balancing_loss_over": "batch"}, ("load_balancing_loss_over",)),
        ({"num_experts": 1, "router_use_bias": True}, ("moe.router_use_bias", "num_experts 1")),
    ],
)
def test_what_has_no_effect_is_said(given: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.warns(UserWarning, match="moe") as caught:
        warn_of_unused(read_moe({"num_experts": 4, **given}))
    (warning,) = caught
    assert [fact for fact in facts if fact not in str(warning.message)] == []


def test_null_is_the_default_and_one_expert_is_no_mixture() -> None:
    moe = read_moe({"num_experts": 4, "top_k": 2, "num_shared_experts": None})
    assert (moe.num_experts, moe.num_in_all, moe.is_on) == (4, 4, True)
    assert moe == read_moe({"num_experts": 4, "top_k": 2, "router_selection_nonlinearity": None})
    assert not read_moe({}).is_on
    assert not read_moe({"num_experts": 1}).is_on
