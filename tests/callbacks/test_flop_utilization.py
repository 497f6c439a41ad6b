"""Floating-point operations per step, and utilization of the peak rate."""

import logging

import pytest
import torch
from torch import nn

from backends.blocks import checkpoint_activations
from modelzoo_trainer import Callback, Checkpoint, MixedPrecision, TrainingLoop
from modelzoo_trainer.callbacks import flop_utilization, profiler
from modelzoo_trainer.callbacks.flop_utilization import FlopCount, FlopUtilization
from modelzoo_trainer.errors import ConfigError, StopTraining
from modelzoo_trainer.zoo.callbacks.compute_norm_gns import ComputeNormGNS
from modelzoo_trainer.zoo.models.experts import MixtureOfExperts
from modelzoo_trainer.zoo.models.moe_settings import read_moe

# Of `Net` and eight samples: two layers 4 -> 4 and one 4 -> 1 forward, their weights' gradients,
# and their inputs' but for the first; a product of m x k and k x n has 2mkn operations.
FORWARD = 2 * 8 * (16 + 16 + 4)
FLOPS = FORWARD + FORWARD + 2 * 8 * (16 + 4)


class Clock(Callback):
    """A step takes two seconds."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(profiler.time, "perf_counter", lambda: self.now)

    def on_train_step_start(self, trainer, model, batch):
        self.now += 2


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_the_operations_are_those_counted_by_hand(make, batches, history, clock):
    rates = FlopUtilization(peak_flops=10 * FLOPS)
    make(clock, rates).fit(batches)
    assert history.of("flops_per_sec") == [(step, FLOPS / 2) for step in (2, 3, 4)]
    assert history.of("flops_utilization") == [(step, pytest.approx(5)) for step in (2, 3, 4)]
    assert rates.perf_metrics == {
        "total_flops": 3 * FLOPS,
        "flops_per_sec": FLOPS / 2,
        "peak_flops": 10 * FLOPS,
        "flops_utilization": pytest.approx(5),
    }


def test_each_shape_is_counted_once(make, batches, history, clock, monkeypatch):
    made = []

    class Counts(flop_utilization.FlopCount):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(flop_utilization, "FlopCount", Counts)
    inputs, targets = batches[0]
    short = (inputs[:2], targets[:2])
    make(clock, FlopUtilization(), max_steps=5).fit([batches[0], short, batches[1], short, short])
    rates = [rate for _, rate in history.of("flops_per_sec")]
    assert rates == [FLOPS / 8, FLOPS / 2, FLOPS / 8, FLOPS / 8]
    assert len(made) == 2


def test_a_window_of_accumulation_has_the_operations_of_its_batches(make, batches, history, clock):
    loop = TrainingLoop(max_steps=3, grad_accum_steps=2)
    make(clock, FlopUtilization(), loop=loop).fit(batches)
    assert history.of("flops_per_sec") == [(2, FLOPS / 2), (3, FLOPS / 2)]


def test_the_optimizer_and_validations_do_not_count(make, batches, history, clock):
    class Multiplies(torch.optim.SGD):
        def step(self, closure=None):
            torch.ones(9, 9) @ torch.ones(9, 9)
            return super().step(closure)

    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    settings = {"optimizer": lambda model: Multiplies(model.parameters(), lr=0.1), "loop": loop}
    make(clock, FlopUtilization(), **settings).fit(batches, batches[:2])
    assert {rate for _, rate in history.of("flops_per_sec")} == {FLOPS / 2}


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_the_count_is_the_same_on_every_device(make, batches, device):
    rates = FlopUtilization()
    make(rates, device=device).fit(batches)
    assert rates.perf_metrics["total_flops"] == 3 * FLOPS


def test_a_device_without_a_known_peak_is_reported_once(make, batches, history, caplog):
    trainer = make(FlopUtilization())
    with caplog.at_level(logging.INFO, "modelzoo_trainer"):
        trainer.fit(batches)
        trainer.loop.max_steps = 6
        trainer.fit(batches)
    assert caplog.text.count("the peak FLOP/s of 'cpu' for float32") == 1
    assert history.of("flops_utilization") == []
    assert len(history.of("flops_per_sec")) == 4


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(None, torch.float32), (MixedPrecision(), torch.bfloat16), ("double", torch.float64)],
)
@pytest.mark.slow_cases(every=4)
def test_the_peak_is_that_of_the_type_that_is_computed_in(
    make, batches, net, monkeypatch, precision, dtype
):
    asked = []

    def peak(backend, kind):
        asked.append(kind)
        return 1e3

    class Double(net):
        def __init__(self):
            super().__init__()
            self.double()

    monkeypatch.setattr(flop_utilization, "peak_flops", peak)
    is_double = precision == "double"
    if is_double:
        batches = [(inputs.double(), targets.double()) for inputs, targets in batches]
    settings = {"model": Double if is_double else net}
    if isinstance(precision, MixedPrecision):
        settings["precision"] = precision
    rates = FlopUtilization()
    make(rates, **settings).fit(batches)
    assert asked == [dtype]
    assert rates.perf_metrics["peak_flops"] == 1e3


def test_nothing_is_left_of_a_count_that_an_error_cuts_off(make, batches, net):
    class Fails(net):
        def forward(self, batch):
            raise ZeroDivisionError

    trainer = make(FlopUtilization(), model=Fails)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not nn.modules.module._global_forward_pre_hooks


def test_nothing_is_left_of_a_count_that_a_stop_cuts_off(make, batches, net):
    class Stops(net):
        def forward(self, batch):
            raise StopTraining

    make(FlopUtilization(), model=Stops).fit(batches)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_numbers_of_the_run_are_the_same_with_it(make, batches, tmp_path):
    plain = make(model_dir=tmp_path / "plain")
    counted = make(FlopUtilization(), model_dir=tmp_path / "counted")
    plain.fit(batches)
    counted.fit(batches)
    for one, other in zip(plain.model.parameters(), counted.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_resumed_run_does_not_count_again(make, batches, monkeypatch):
    make(FlopUtilization(), max_steps=2, checkpoint=Checkpoint(steps=2)).fit(batches)
    monkeypatch.setattr(flop_utilization, "FlopCount", None)
    rates = FlopUtilization()
    make(rates, max_steps=5, checkpoint=Checkpoint(steps=2)).fit(batches)
    assert rates.perf_metrics["total_flops"] == 2 * FLOPS


def test_another_model_is_counted_again(make, batches, net):
    class Wide(net):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    rates = FlopUtilization()
    rates.load_state_dict({"num_params": 45, "counts": {"8x4,8x1": 1}})
    make(rates, model=Wide).fit(batches)
    assert rates.perf_metrics["total_flops"] == 3 * (FLOPS + 3 * 2 * 8 * 16)


def test_attention_counts_on_the_host_too():
    query, key = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 7, 8)
    count = FlopCount()
    outputs = nn.functional.scaled_dot_product_attention(query, key, key)
    forward = count.total
    outputs.sum().backward()
    count.stop()
    product = 2 * 2 * 3 * 5 * 7 * 8  # of the scores; that with the values is as large
    assert forward == 2 * product
    assert count.total - forward == 5 * product  # recomputed scores, and four gradients


@pytest.mark.slow
def test_a_compiled_model_is_counted_and_is_compiled_afterwards(make, batches, net):
    compiled = []

    def compiler(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = net()
    model.compile(backend=compiler)
    rates = FlopUtilization()
    make(rates, model=lambda: model).fit(batches)
    torch._dynamo.reset()
    assert len(compiled) == 1
    assert rates.perf_metrics["total_flops"] == 3 * FLOPS


@pytest.mark.parametrize("peak", [0, -1.0, float("inf"), float("nan"), True, "1e12"])
def test_what_is_no_rate_is_refused(peak):
    with pytest.raises(ConfigError, match=r"FlopUtilization.peak_flops: expected .*, got .*"):
        FlopUtilization(peak)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_measures_the_model_is_not_counted(make, batches, is_first):
    rates, norms = FlopUtilization(), ComputeNormGNS("Linear")
    make(*((norms, rates) if is_first else (rates, norms))).fit(batches)
    assert rates.perf_metrics["total_flops"] == 3 * FLOPS


@pytest.mark.slow
def test_a_compiled_model_is_counted_without_a_warning(make, batches, net, recwarn):
    rates = FlopUtilization()
    make(rates, model=lambda: torch.compile(net(), backend="eager")).fit(batches)
    assert rates.perf_metrics["total_flops"] == 3 * FLOPS
    assert not [each for each in recwarn if "global hooks" in str(each.message)]


class Mixed(nn.Module):
    """A layer, then four experts and a shared one, of which each token uses two and the shared."""

    def __init__(self, num_experts=4, top_k=2):
        super().__init__()
        moe = read_moe({"num_experts": num_experts, "top_k": top_k, "num_shared_experts": 1})
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([MixtureOfExperts(moe, 4, 6, "swiglu", True, 0.0)])
        for param in self.parameters():
            nn.init.normal_(param, std=0.1)

    def forward(self, batch):
        inputs, _ = batch
        hidden = self.first(inputs).unsqueeze(1)
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int32)
        return self.layers[0](hidden, ids, None)[0].square().mean()


@pytest.mark.parametrize("mode", [None, "full"])
def test_of_experts_only_the_work_of_those_that_are_used_counts(make, batches, mode):
    def model():
        mixed = Mixed()
        if mode:
            checkpoint_activations(mixed, mode)
        return mixed

    rates = FlopUtilization()
    make(rates, model=model).fit(batches)

    used, router, first = 3 * 3 * 2 * 8 * 4 * 6, 2 * 8 * 4 * 4, 2 * 8 * 4 * 4
    num = 3 if mode is None else 4  # with recomputation
    assert rates.perf_metrics["total_flops"] == 3 * (num * (used + router) + 2 * first)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_frozen_experts_have_one_product_less(make, batches, is_frozen):
    def model():
        mixed = Mixed()
        mixed.layers[0].experts.requires_grad_(not is_frozen)
        return mixed

    rates = FlopUtilization()
    make(rates, model=model).fit(batches)

    used, others = 3 * 3 * 2 * 8 * 4 * 6, 5 * 2 * 8 * 4 * 4
    assert rates.perf_metrics["total_flops"] == 3 * ((2 if is_frozen else 3) * used + others)
