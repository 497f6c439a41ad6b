import pytest

from tests.xla_here import HAS_XLA, WHY_NOT

if not HAS_XLA:
    pytest.skip(WHY_NOT, allow_module_level=True)

import inspect
from contextlib import contextmanager

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import nn, optim
from torch.utils._pytree import tree_map_only

from backends.errors import BackendError
from backends.sync_guard import SyncGuard
from backends.xla.optimizer_settings import DeviceSettings
from backends.xla.optimizers import LazyOptimizers
from modelzoo_trainer.optim.registry import OPTIMIZERS

pytestmark = pytest.mark.xla

DEVICE = torch_xla.device()
# Zero and one are constants for torch_xla; 0.9 and 0.001 are among the numbers of Adam.
RATES = (0.001, 0.002, 0.0, 0.01, 0.001, 0.9e-3, 0.0, 0.1, 0.002, 0.5, 0.0, 1.0)
INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))


def send(tensors):
    return torch_xla._XLAC._xla_tensors_from_aten(tensors, [str(DEVICE)] * len(tensors))


def matrices(model):
    return [param for param in model.parameters() if param.dim() == 2]


def torchs(cls, **settings):
    select = matrices if cls is optim.Muon else nn.Module.parameters
    return lambda model: cls(select(model), lr=0.1, **settings)


def ours(name, **settings):
    return lambda model: OPTIMIZERS[name](model, **settings)


REFUSED = (optim.Adafactor, optim.LBFGS, optim.SparseAdam)
CASES = {
    f"torch.{name}": torchs(cls)
    for name, cls in vars(optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, optim.Optimizer)
    and cls not in (optim.Optimizer, *REFUSED)
}
CASES |= {f"ours.{name}": ours(name) for name in OPTIMIZERS}
CASES |= {
    "SGD, Nesterov": torchs(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, dampened": torchs(optim.SGD, momentum=0.9, dampening=0.1, maximize=True),
    "RMSprop, centered": torchs(optim.RMSprop, momentum=0.9, centered=True, weight_decay=0.01),
    "Adagrad, decaying": torchs(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "AdamW, foreach": torchs(optim.AdamW, amsgrad=True, foreach=True),
    "NAdam, decoupled": torchs(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamBase, both decays": ours("AdamBase", l2_regularization_rate=0.1, weight_decay=0.1),
    "AdamW, biased": ours("AdamW", correct_bias=False),
    "Adafactor, relative": ours("Adafactor", relative_step=True, beta1=0.9, weight_decay=0.1),
}
# Their first step is another one; a number in their graph is one in it; or their state is begun
# after the loss, and older than the losses to come: outputs are in order of age.
TWO_GRAPHS = (
    *("SGD, dampened", "ours.Adafactor", "Adafactor, relative"),
    *("ours.Lamb", "ours.Lion", "ours.Muon"),
)
# Each new rate of zero is another graph: the rate is a number.
MORE_GRAPHS = ("ours.ASGD",)
# The corrections in single precision; the orthogonalization in bfloat16.
LOOSE = {"RAdam": 1e-2, "Muon": 5e-2}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh())


def count(metric):
    return (met.metric_data(metric) or [0])[0]


class Run:
    def __init__(self, make, device=DEVICE):
        self.model = build().to(device)
        self.on_device = device is DEVICE
        self.data = send([INPUTS, TARGETS]) if self.on_device else [INPUTS, TARGETS]
        self.optimizer = make(self.model)
        self.compilations = []
        if self.on_device:
            self.lazy = LazyOptimizers(send, DEVICE)
            self.lazy.prepare(self.optimizer)
            torch_xla.sync()

    def backward(self):
        self.loss = (self.model(self.data[0]) - self.data[1]).square().mean()
        self.loss.backward()

    def step(self, *, keep=None, **settings):
        for group in self.optimizer.param_groups:
            group.update(settings)
        if not self.on_device:
            self.backward()
            self.optimizer.step()
            self.model.zero_grad()
        else:
            self.lazy.begin()
            with self.traced():
                self.backward()
                self.lazy.step(self.optimizer, keep)
                self.model.zero_grad()

    @contextmanager
    def traced(self):
        xm.wait_device_ops()
        compilations, reads = count("CompileTime"), count("TransferFromDeviceTime")
        torch_xla._XLAC._set_allow_execution(False)  # a read raises
        try:
            yield
        finally:
            torch_xla._XLAC._set_allow_execution(True)
        torch_xla.sync()
        xm.wait_device_ops()
        assert count("TransferFromDeviceTime") == reads
        self.compilations.append(count("CompileTime") - compilations)

    def params(self):
        return [param.detach().cpu() for param in self.model.parameters()]

    def host_state(self):
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, self.optimizer.state_dict())


def is_same(left, right):
    return all(map(torch.equal, left, right))


def assert_same_state(state, expected, rtol=1e-3):
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for key, entries in expected["state"].items():
        assert list(state["state"][key]) == list(entries)
        torch.testing.assert_close(state["state"][key], entries, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_on_the_host_with_one_graph(case):
    run, host = Run(CASES[case]), Run(CASES[case], "cpu")
    for lr in RATES:
        run.step(lr=lr)
        host.step(lr=lr)
        assert all(group["lr"] is lr for group in run.optimizer.param_groups)
    rtol = next((rtol for name, rtol in LOOSE.items() if case.endswith(name)), 2e-4)
    torch.testing.assert_close(run.params(), host.params(), rtol=rtol, atol=rtol)
    assert_same_state(run.host_state(), host.optimizer.state_dict(), 5 * rtol)
    if case not in MORE_GRAPHS:
        assert sum(run.compilations[2 if case in TWO_GRAPHS else 1 :]) == 0, run.compilations


@pytest.mark.parametrize("case", ["torch.AdamW", "torch.Adam", "ours.Lion", "ours.AdamBase"])
def test_a_schedule_of_the_weight_decay_costs_one_graph(case):
    run, host = Run(CASES[case]), Run(CASES[case], "cpu")
    for lr, decay in zip(RATES, (0.1, 0.0, 1.0, 0.5, 0.0, 0.999, 0.01, 0.9), strict=False):
        run.step(lr=lr, weight_decay=decay)
        host.step(lr=lr, weight_decay=decay)
    torch.testing.assert_close(run.params(), host.params(), rtol=1e-4, atol=1e-5)
    assert sum(run.compilations[2:]) == 0
    assert run.optimizer.param_groups[0]["weight_decay"] == 0.9


def test_a_schedule_of_the_momentum_costs_one_graph():
    run, host = Run(CASES["SGD, Nesterov"]), Run(CASES["SGD, Nesterov"], "cpu")
    for momentum in (0.9, 0.8, 1.0, 0.5, 0.99, 0.01):
        run.step(lr=0.01, momentum=momentum)
        host.step(lr=0.01, momentum=momentum)
    torch.testing.assert_close(run.params(), host.params(), rtol=1e-4, atol=1e-5)
    assert sum(run.compilations[2:]) == 0


@pytest.mark.parametrize(
    "case",
    ["torch.AdamW", "ours.NAdam", "torch.Adagrad", "torch.Adadelta", "SGD, Nesterov", "torch.ASGD"],
)
def test_a_checkpoint_goes_to_the_host_and_back_and_the_graph_stays(case):
    first, host = Run(CASES[case]), Run(CASES[case], "cpu")
    for _ in range(2):
        first.step(lr=0.01)
    host.model.load_state_dict({key: v.cpu() for key, v in first.model.state_dict().items()})
    host.optimizer.load_state_dict(first.host_state())
    host.step(lr=0.01)
    back = Run(CASES[case])
    back.model.load_state_dict(host.model.state_dict())
    back.optimizer.load_state_dict(host.optimizer.state_dict())
    torch_xla.sync()
    first.step(lr=0.01)
    torch.testing.assert_close(host.params(), first.params(), rtol=1e-4, atol=1e-6)
    host.step(lr=0.02)
    back.step(lr=0.02)
    torch.testing.assert_close(back.params(), host.params(), rtol=1e-4, atol=1e-6)
    assert_same_state(back.host_state(), host.optimizer.state_dict())
    assert back.compilations == [0]


@pytest.mark.parametrize(
    "case",
    [
        *("torch.AdamW", "AdamW, biased", "AdamW, foreach", "torch.Adagrad", "torch.Adadelta"),
        *("SGD, Nesterov", "torch.SGD", "torch.ASGD", "ours.Lamb", "ours.Muon", "ours.NAdam"),
    ],
)
def test_a_masked_step_leaves_no_trace_from_the_first_on(case):
    run, plain = Run(CASES[case]), Run(CASES[case])
    before = run.params()
    yes, no = send([torch.tensor(True), torch.tensor(False)])
    run.step(lr=0.01, keep=no)
    assert is_same(run.params(), before)
    for keep in (yes, no, yes):
        before, state = run.params(), run.host_state()
        run.step(lr=0.01, keep=keep)
        if keep is no:
            assert is_same(run.params(), before)
            assert str(run.host_state()) == str(state)
        else:
            plain.step(lr=0.01)
    rtol = 5e-2 if "Muon" in case else 1e-4
    torch.testing.assert_close(run.params(), plain.params(), rtol=rtol, atol=rtol / 10)
    assert_same_state(run.host_state(), plain.host_state(), rtol)
    assert run.compilations[2 if case in TWO_GRAPHS else 1 :] in ([0, 0], [0, 0, 0])


@pytest.mark.parametrize("case", ["ours.Adafactor", "ours.ASGD", "SGD, dampened"])
def test_what_cannot_be_put_back_is_not_masked(case):
    run = Run(CASES[case])
    name = type(run.optimizer).__name__
    with pytest.raises(BackendError, match=rf"{name} keeps a part .* Use AdamW"):
        run.step(lr=0.1, keep=send([torch.tensor(True)])[0])


@pytest.mark.parametrize("cls", REFUSED)
def test_an_optimizer_that_reads_is_refused_by_its_step(cls):
    class Mine(cls):
        pass

    with pytest.raises(BackendError, match=r"Mine does not work .*Use .*AdamW"):
        LazyOptimizers(send, DEVICE).prepare(Mine(build().parameters(), lr=0.1))


@pytest.mark.parametrize("key", ["fused", "differentiable"])
def test_a_switch_that_does_not_work_is_refused(key):
    optimizer = optim.AdamW(build().parameters())
    optimizer.param_groups[0][key] = True
    with pytest.raises(BackendError, match=f"AdamW with {key}=True .*Remove {key}"):
        LazyOptimizers(send, DEVICE).prepare(optimizer)


class Own(optim.Optimizer):
    """Asks its settings what many optimizers ask, and has numbers where torch wants them."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "decay": 0.1, "count": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            lr = group["lr"]
            if lr == 0 or not lr > 0 or not group["decay"]:
                raise RuntimeError("the step depends on the value")
            bound = min(lr, 0.1)
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                state["mean"] = state["mean"].lerp(param.grad, lr)
                update = param.grad.sub(state["mean"], alpha=lr)
                param.addcdiv_(update, update.abs() + 1, value=-bound)
                param.add_(param, alpha=-lr * group["decay"])


def own(model):
    return Own(model.parameters(), 0.1)


def test_an_optimizer_of_the_users_own_works():
    run, host = Run(own), Run(own, "cpu")
    for lr in (0.01, 0.05, 0.02):
        run.step(lr=lr)
        host.step(lr=lr)
    torch.testing.assert_close(run.params(), host.params(), rtol=1e-4, atol=1e-6)
    run.step(lr=0.0)  # counts as a small number
    assert run.compilations[1:] == [0, 0, 0]
    assert run.optimizer.param_groups[0]["count"] == 4
    with pytest.raises(BackendError, match="Own keeps a part"):
        run.step(lr=0.1, keep=send([torch.tensor(True)])[0])


class Wrapped(optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_a_step_around_torchs_works():
    run, host = Run(torchs(Wrapped)), Run(torchs(Wrapped), "cpu")
    (yes,) = send([torch.tensor(True)])
    for lr in (0.01, 0.0, 1.0):
        run.step(lr=lr, keep=yes)
        host.step(lr=lr)
    torch.testing.assert_close(run.params(), host.params(), rtol=1e-4, atol=1e-5)
    assert_same_state(run.host_state(), host.optimizer.state_dict())
    assert run.compilations[1:] == [0, 0]


def test_torchs_schedules_work():
    run = Run(torchs(optim.AdamW))
    schedule = optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=1.0, total_steps=4)
    for _ in range(3):
        run.step()
        schedule.step()
        assert isinstance(run.optimizer.param_groups[0]["lr"], float)
    assert run.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]


def test_a_checkpoint_of_a_fused_optimizer_fits():
    run, host = Run(torchs(optim.AdamW)), Run(torchs(optim.AdamW, fused=True), "cpu")
    host.step(lr=0.1)
    run.optimizer.load_state_dict(host.optimizer.state_dict())
    run.step(lr=0.1)
    assert run.host_state()["param_groups"] == host.optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("case", ["torch.AdamW", "SGD, Nesterov", "ours.Lion", "torch.Adagrad"])
def test_the_guard_of_reads_sees_none(case):
    guard, run = SyncGuard(), Run(CASES[case])
    for lr in (0.1, 0.0, torch.tensor(0.2)):
        run.optimizer.param_groups[0]["lr"] = lr
        run.backward()
        guard.arm()
        try:
            run.lazy.step(run.optimizer, send([torch.tensor(True)])[0])
        finally:
            guard.disarm()
    assert guard.num_refused == 0


@pytest.mark.parametrize("case", ["torch.AdamW", "SGD, Nesterov"])
def test_a_parameter_without_a_gradient_has_no_state_until_it_has_one(case):
    run = Run(CASES[case])
    bias = run.model[0].bias.requires_grad_(False)
    run.step(lr=0.1)
    assert bias not in run.optimizer.state
    bias.requires_grad_(True)
    for _ in range(3):
        run.step(lr=0.1)
    assert bias in run.optimizer.state
    assert run.compilations[-1] == 0


def test_the_numbers_are_back_after_an_error():
    run = Run(torchs(optim.AdamW))

    def fail(*_):
        assert isinstance(run.optimizer.param_groups[0]["lr"], torch.Tensor)
        raise RuntimeError("stop")

    handle = run.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        run.step(lr=0.3)
    handle.remove()
    assert run.optimizer.param_groups[0]["lr"] == 0.3
    run.step(lr=0.3)


@pytest.mark.parametrize("case", [optim.AdamW, optim.SGD])
def test_a_tensor_for_the_rate_counts_as_its_number(case):
    rate = torch.tensor(0.1)
    run = Run(lambda model: case(model.parameters(), lr=rate))
    host = Run(torchs(case), "cpu")
    for number in (0.1, 0.0, 0.01):
        rate.fill_(number)
        run.step()
        host.step(lr=number)
    assert run.optimizer.param_groups[0]["lr"] is rate
    torch.testing.assert_close(run.params(), host.params(), rtol=1e-4, atol=1e-6)
    assert run.compilations[1:] == [0, 0]


def test_a_tensor_on_the_device_is_left_alone():
    (rate,) = send([torch.tensor(0.1)])
    run = Run(lambda model: optim.AdamW(model.parameters(), lr=rate, capturable=True))
    run.step()
    run.step()
    assert run.optimizer.param_groups[0]["lr"] is rate
    assert run.compilations[1:] == [0]


def test_the_state_dict_has_the_users_switches():
    run = Run(torchs(optim.AdamW, foreach=True))
    run.step(lr=0.1)
    (group,) = run.optimizer.param_groups
    assert (group["capturable"], group["foreach"]) == (True, False)
    (saved,) = run.optimizer.state_dict()["param_groups"]
    assert (saved["capturable"], saved["foreach"]) == (False, True)


def test_a_group_may_be_added():
    run = Run(lambda model: optim.AdamW([model[0].weight], lr=0.1))
    run.step(lr=0.1)
    run.optimizer.add_param_group({"params": [run.model[0].bias]})
    before = run.params()
    for _ in range(3):
        run.step(lr=0.1)
    assert not is_same(run.params()[1:], before[1:])
    assert run.compilations[-1] == 0
    assert [one["capturable"] for one in run.optimizer.state_dict()["param_groups"]] == [False] * 2


CALLS = {
    "add": lambda a, b, c, x: (
        a.add(b, alpha=x),
        torch.add(a, b, alpha=x),
        a.clone().add_(b, alpha=x),
    ),
    "sub": lambda a, b, c, x: (a.sub(b, alpha=x), a.clone().sub_(other=b, alpha=x)),
    "addcmul": lambda a, b, c, x: (a.addcmul(b, c, value=x), a.clone().addcmul_(b, c, value=x)),
    "addcdiv": lambda a, b, c, x: (a.addcdiv(b, c, value=x), a.clone().addcdiv_(b, c, value=x)),
    "lerp": lambda a, b, c, x: (a.lerp(b, x), a.clone().lerp_(b, weight=x)),
    "_foreach_add": lambda a, b, c, x: torch._foreach_add([a], [b], alpha=x),
    "_foreach_addcmul": lambda a, b, c, x: torch._foreach_addcmul([a], [b], [c], value=x),
    "_foreach_addcdiv": lambda a, b, c, x: torch._foreach_addcdiv([a, a], [b, b], [c, c], x),
    "_foreach_lerp": lambda a, b, c, x: torch._foreach_lerp([a], [b], x),
    "_foreach_sub_": lambda a, b, c, x: torch._foreach_sub_([d := a.clone()], [b], alpha=x) or d,
    "addmm": lambda a, b, c, x: torch.addmm(a, b, c, alpha=x, beta=2),
    "addmm_": lambda a, b, c, x: a.clone().addmm_(b, c, beta=x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_that_want_numbers_take_tensors(call, dtype):
    tensors = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0)).add(1).to(dtype)
    number = torch.tensor(0.3)
    with DeviceSettings({id(number): 0.3}):
        result = call(*tensors, number)
    expected = call(*tensors, 0.3)
    rtol = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(result, expected, rtol=rtol, atol=rtol)
