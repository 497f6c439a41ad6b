"""The Model Zoo's callbacks that look at a run: each in a small one."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, Logging, callbacks
from modelzoo_trainer.callbacks import profiler
from modelzoo_trainer.optim.sparsity import Static
from tests.doubles import History, Interrupted, TinyModel, constant_batches, tiny_batches
from tests.doubles import Scale as OneWeight


class Layered(nn.Module):
    """A layer with a number in its name, and a head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        return ((self.head(torch.tanh(self.layers[0](batch[0]))) - batch[1]) ** 2).mean()


class Values(Callback):
    """Keeps the weights before each update, and their gradients."""

    def __init__(self):
        self.weights, self.grads = [], []

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.weights.append({k: v.detach().clone() for k, v in model.named_parameters()})
        self.grads.append({k: v.grad.clone() for k, v in model.named_parameters()})


def norm(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).double().norm().item()


class Clock(Callback):
    """A clock of the test's own: a step takes two seconds."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(profiler.time, "perf_counter", lambda: self.now)

    def on_train_step_start(self, trainer, model, batch):
        self.now += 2


@pytest.fixture
def history():
    return History()


def test_c_check_loss__a_loss_that_is_no_number_ends_the_run(trainer_of):
    trainer = trainer_of(callbacks.CheckLoss(), model=OneWeight, checkpoint=Checkpoint(steps=1))
    with pytest.raises(FloatingPointError, match="loss is nan at global_step 2"):
        trainer.fit(constant_batches(1, float("nan"), 1))
    assert [path.name for path in trainer.model_dir.glob("checkpoint_*")] == ["checkpoint_1"]


def test_c_check_loss__also_that_of_a_validation(trainer_of):
    trainer = trainer_of(callbacks.CheckLoss(), model=OneWeight)
    with pytest.raises(FloatingPointError, match="inf"):
        trainer.validate(constant_batches(float("inf")))


def test_c_check_loss__one_with_dimensions_is_refused(trainer_of):
    class Whole(OneWeight):
        def forward(self, batch):
            return {"loss": self.weight * batch}

    with pytest.raises((TypeError, ValueError, RuntimeError), match="loss"):
        trainer_of(callbacks.CheckLoss(), model=Whole).fit(constant_batches(1))


def test_c_compute_norm__has_the_norms_before_the_update_and_before_clipping(trainer_of, history):
    seen = Values()
    trainer_of(seen, callbacks.ComputeNorm(), model=Layered, loggers=history).fit(tiny_batches())
    steps = list(range(1, 4))
    for name, tensors in {
        "model_wise_params_norm": [each.values() for each in seen.weights],
        "model_wise_grad_norm": [each.values() for each in seen.grads],
        "per_layer_grad_norm/layer_0": [
            [grad for key, grad in each.items() if key.startswith("layers.0.")]
            for each in seen.grads
        ],
    }.items():
        expected = [pytest.approx(norm(each)) for each in tensors]
        assert history.of(name) == list(zip(steps, expected, strict=True))


def test_c_compute_norm_gns__has_the_squared_norms_of_examples(trainer_of, history):
    trainer = trainer_of(
        callbacks.ComputeNormGNS(["Linear"]), model=Layered, loggers=history, num_steps=1
    )
    batches = tiny_batches(1)
    sqnorms = []
    for idx in range(4):
        loss = trainer.model(tuple(part[idx : idx + 1] for part in batches[0]))
        grads = torch.autograd.grad(loss, list(trainer.model.head.parameters()))
        sqnorms.append(norm(grads) ** 2)
    trainer.fit(batches)
    assert history.of("pegsqnorm/head") == [(1, pytest.approx(sum(sqnorms) / 4))]
    assert len(history.of("gsqnorm/head")) == len(history.of("model_wise_grad_norm")) == 1


def test_c_na_n_checker__names_the_module_that_was_first(trainer_of):
    class Spoilt(TinyModel):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.head.bias.fill_(float("inf"))

    checker = callbacks.NaNChecker(num_steps=1)
    with pytest.raises(FloatingPointError, match=r"'head\.bias' before the step is not finite"):
        trainer_of(checker, model=Spoilt).fit(tiny_batches())


def test_c_dump_activations__files_have_outputs_and_gradients(trainer_of):
    seen = Values()
    trainer = trainer_of(seen, callbacks.DumpActivations(buffer_steps=2), num_steps=3)
    trainer.fit(tiny_batches())
    folder = trainer.model_dir / "act_dumps"
    files = [np.load(folder / name) for name in ("act_dumps.npz", "act_dumps_1.npz")]
    assert [file["step"].tolist() for file in files] == [[1, 2], [3]]
    inputs = tiny_batches()[2][0]
    weights, bias = seen.weights[2]["hidden.weight"], seen.weights[2]["hidden.bias"]
    np.testing.assert_allclose(files[1]["hidden.fwd"][0], inputs @ weights.T + bias, rtol=1e-5)
    np.testing.assert_allclose(files[1]["head.weight.grad"][0], seen.grads[2]["head.weight"])
    assert files[1]["head.bwd"].shape == (1, 4, 1)


class Halves(callbacks.Profiler):
    @property
    def perf_metrics(self):
        return {"halves": 0.5}


def test_c_profiler__is_the_base_of_what_has_perf_metrics(trainer_of):
    trainer = trainer_of(Halves(), callbacks.RateProfiler(), callbacks.CheckLoss())
    found = [type(one).__name__ for one in trainer.get_callbacks(callbacks.Profiler)]
    assert found == ["Halves", "RateProfiler"]


def test_c_save_performance_data__writes_what_profilers_have(trainer_of):
    rates = callbacks.RateProfiler()
    trainer = trainer_of(Halves(), rates, callbacks.SavePerformanceData())
    trainer.fit(tiny_batches())
    found = json.loads((trainer.artifact_dir / "performance.json").read_text())
    assert found == {"Halves": {"halves": 0.5}, "RateProfiler": rates.perf_metrics}
    assert rates.perf_metrics["total_samples"] > 0


def test_c_save_performance_data__not_after_an_error(trainer_of):
    class Fails(Callback):
        def on_train_end(self, trainer, model, loop, loop_idx):
            raise Interrupted

    trainer = trainer_of(Fails(), Halves(), callbacks.SavePerformanceData())
    with pytest.raises(Interrupted):
        trainer.fit(tiny_batches())
    assert not (trainer.artifact_dir / "performance.json").exists()


def test_c_op_profiler__traces_the_steps_of_its_window(trainer_of):
    trainer = trainer_of(callbacks.OpProfiler(start_step=2, end_step=3), max_steps=4)
    trainer.fit(tiny_batches())
    events = json.loads((trainer.model_dir / "chrome_trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::tanh" for event in events) == 2


def test_c_rate_profiler__counts_samples_by_the_clock(trainer_of, history, monkeypatch):
    clock, rates = Clock(monkeypatch), callbacks.RateProfiler()
    trainer_of(clock, rates, loggers=history).fit(tiny_batches(size=6))
    assert history.of("local_samples_per_sec") == [(2, 3.0), (3, 3.0)]
    assert history.of("avg_steps_per_sec") == [(2, 0.5), (3, 0.5)]
    assert rates.perf_metrics["total_time"] == 4
    assert rates.perf_metrics["total_samples"] == 12


def test_c_flop_utilization__is_the_share_of_the_peak(trainer_of, history, monkeypatch):
    # Two products of 4 x 3 x 4 and of 4 x 4 x 1 multiplications, their weights' gradients,
    # and the gradient of the second one's input.
    flops = 2 * (2 * 4 * 3 * 4 + 3 * 4 * 4)
    rate = callbacks.FlopUtilization(peak_flops=flops * 2.0)
    trainer_of(Clock(monkeypatch), rate, loggers=history).fit(tiny_batches())
    assert history.of("flops_per_sec") == [(2, flops / 2), (3, flops / 2)]
    assert history.of("flops_utilization") == [(2, 25.0), (3, 25.0)]


def test_c_duration_profiler__tells_what_is_left(trainer_of, history, monkeypatch):
    watch = callbacks.DurationProfiler()
    trainer_of(Clock(monkeypatch), watch, loggers=history, max_steps=5).fit(tiny_batches())
    left = [(2, 6), (3, 4), (4, 2), (5, 0)]
    assert history.of("time_remaining") == history.of("loop_time_remaining") == left


def test_c_duration_profiler__an_error_before_it_began_goes_through(trainer_of):
    class Fails(Callback):
        def on_enter_fit(self, trainer, stack, train_dataloader, val_dataloader, loop):
            raise Interrupted

    with pytest.raises(Interrupted):
        trainer_of(Fails(), callbacks.DurationProfiler()).fit(tiny_batches())


def test_c_count_params__the_table_has_all_of_them(trainer_of, caplog):
    counting = callbacks.CountParams(search_and_replace=[(r"\.(weight|bias)", "")])
    trainer = trainer_of(counting)
    rows = {line.split()[0]: line.split() for line in counting.table.splitlines() if line.strip()}
    assert {"hidden", "head", "total"} <= rows.keys()
    assert "16" in rows["hidden"]  # 3 * 4 + 4
    assert "5" in rows["head"]
    assert "21" in rows["total"]
    with caplog.at_level("INFO", "modelzoo_trainer"):
        trainer.fit(tiny_batches())
        trainer.validate(tiny_batches(1))
    assert caplog.text.count(counting.table) == 1


def test_c_model_eval_metrics__logs_and_resets_metrics_by_name(trainer_of, history):
    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.reset()

        def reset(self):
            self.total = 0.0

        def compute(self):
            return torch.tensor(self.total)

    class Counting(TinyModel):
        def __init__(self):
            super().__init__()
            self.samples = Metric()

        def forward(self, batch):
            self.samples.total += len(batch[0])
            return super().forward(batch)

    trainer = trainer_of(callbacks.ModelEvalMetrics(), model=Counting, loggers=history)
    trainer.fit(tiny_batches(), tiny_batches(2))
    assert history.of("validate_0/samples") == [(3, 8.0)]
    assert trainer.model.samples.total == 0


def test_c_log_optimizer_param_group__logs_each_group(trainer_of, history):
    def grouped(model):
        groups = [{"params": model.hidden.parameters(), "lr": 0.5}, {"params": [model.head.weight]}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    lr = callbacks.LogOptimizerParamGroup(["lr", "momentum"])
    trainer_of(lr, optimizer=grouped, loggers=history, num_steps=1).fit(tiny_batches())
    expected = {"lr/0": 0.5, "lr/1": 0.1, "momentum/0": 0.9, "momentum/1": 0.9}
    assert {name: history.of(name) for name in expected} == {
        name: [(1, value)] for name, value in expected.items()
    }


def test_c_log_optimizer_param_group__an_unknown_key_is_told_at_set_up(trainer_of):
    with pytest.raises(ValueError, match="rl"):
        trainer_of(callbacks.LogOptimizerParamGroup("rl"))


def test_c_log_sparsity__has_target_and_actual(trainer_of, history):
    sparsity = Static(0.5, param_filter="hidden.weight")
    trainer_of(callbacks.LogSparsity(), sparsity=sparsity, loggers=history).fit(tiny_batches(1))
    assert history.of("sparsity/hidden.weight/target") == [(1, 0.5)]
    assert history.of("sparsity/hidden.weight/actual") == [(1, 0.5)]


def test_c_log_input_summaries__has_the_batch_on_log_steps(trainer_of, history):
    batches = tiny_batches()
    logging = Logging(log_steps=2)
    inputs = callbacks.LogInputSummaries()
    trainer_of(inputs, logging=logging, loggers=history, max_steps=2).fit(batches)
    for place in (0, 1):
        ((step, value),) = history.of(f"input.{place}")
        assert step == 2
        assert torch.equal(torch.as_tensor(value), batches[1][place])


def test_c_dump_available_tensor_names__lists_what_listeners_know(trainer_of):
    trainer = trainer_of(callbacks.DumpAvailableTensorNames())
    trainer.fit(tiny_batches(), tiny_batches(1))
    text = (trainer.artifact_dir / "available_tensor_names.txt").read_text()
    names = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {"hidden.fwd", "hidden.bwd", "head.weight", "head.weight.grad"} <= names
    assert re.search(r"hidden\.fwd.*4.*4.*float32", text)
    assert (trainer.artifact_dir / "available_tensor_names_validate.txt").exists()


def test_c_summary_tensor_listener__logs_what_its_patterns_match(trainer_of, history):
    seen = Values()
    listener = callbacks.SummaryTensorListener("seen", ["head.*.grad"])
    trainer_of(seen, listener, loggers=history, num_steps=1).fit(tiny_batches())
    names = {name for _, line in history.lines for name in line if name.startswith("seen/")}
    assert names == {"seen/head.weight.grad", "seen/head.bias.grad"}
    ((_, value),) = history.of("seen/head.weight.grad")
    torch.testing.assert_close(torch.as_tensor(value), seen.grads[0]["head.weight"])


def test_c_norm_tensor_listener__logs_their_norms_and_that_of_all(trainer_of, history):
    seen = Values()
    listener = callbacks.NormTensorListener("size", "head.*.grad")
    trainer_of(seen, listener, loggers=history, num_steps=1).fit(tiny_batches())
    grads = [seen.grads[0]["head.weight"], seen.grads[0]["head.bias"]]
    assert history.of("size/head.weight.grad") == [(1, pytest.approx(norm(grads[:1])))]
    assert history.of("size/__all__") == [(1, pytest.approx(norm(grads)))]
