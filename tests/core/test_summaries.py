import pytest
import torch
from torch import nn

from modelzoo_trainer import (
    Callback,
    Logger,
    Logging,
    Trainer,
    TrainingLoop,
    summarize_scalar,
    summarize_tensor,
)
from modelzoo_trainer.core.parts.closures import active, active_trainer


class History(Logger):
    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step):
        self.lines.append((step, dict(metrics)))

    def of(self, name):
        return [(step, metrics[name]) for step, metrics in self.lines if name in metrics]


class Net(nn.Module):
    """Call a function on its hidden state in the middle."""

    def __init__(self, look):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.look = look

    def forward(self, batch):
        hidden = self.layer(batch)
        self.look(hidden)
        return self.head(hidden.relu_()).square().mean()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(10)]


@pytest.fixture
def history():
    return History()


@pytest.fixture
def make(tmp_path, history):
    def trainer(look, **settings):
        arguments = {
            "device": "cpu",
            "model_dir": tmp_path / "run",
            "model": lambda: Net(look),
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            "loop": TrainingLoop(max_steps=4),
            "logging": Logging(log_steps=2),
            "loggers": history,
            "seed": 0,
        }
        return Trainer(**(arguments | settings))

    return trainer


class Means:
    """Log the mean of what it receives, and keep it."""

    def __init__(self):
        self.seen = []

    def __call__(self, hidden):
        self.seen.append(hidden.detach().mean().clone())
        summarize_scalar("mean", hidden.mean())


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_scalar_of_a_forward_reaches_the_loggers_on_log_steps(make, batches, history, device):
    look = Means()
    make(look, device=device).fit(batches)
    assert history.of("mean") == [(2, look.seen[1].item()), (4, look.seen[3].item())]


def test_of_several_batches_per_step_the_last_one_is_logged(make, batches, history):
    look = Means()
    loop = TrainingLoop(max_steps=4, grad_accum_steps=2)
    make(look, loop=loop, logging=Logging(log_steps=1)).fit(batches)
    assert [value for _, value in history.of("mean")] == [one.item() for one in look.seen[1::2]]


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_tensor_is_logged_as_it_was_at_the_call(make, batches, history, device):
    seen = []

    def look(hidden):
        seen.append(hidden.detach().clone())
        summarize_tensor("hidden", hidden)
        summarize_tensor("number", torch.ones((), device=hidden.device))

    make(look, device=device).fit(batches)
    [(_, first), (_, second)] = history.of("hidden")
    assert torch.equal(first, seen[1])
    assert torch.equal(second, seen[3])
    assert history.of("number")[0][1].tolist() == [1.0]


def test_numbers_need_no_tensor(make, batches, history):
    make(lambda hidden: summarize_scalar("size", hidden.shape[0])).fit(batches)
    assert history.of("size") == [(2, 8), (4, 8)]


def test_a_validation_has_its_prefix(make, batches, history):
    make(Means(), loop=TrainingLoop(max_steps=4)).fit(batches, batches[:1])
    assert [step for step, _ in history.of("validate_0/mean")] == [4]


def test_of_two_calls_in_a_training_batch_the_first_counts(make, batches, history):
    def look(hidden):
        summarize_scalar("call", 1)
        summarize_scalar("call", 2)

    make(look).fit(batches)
    assert history.of("call") == [(2, 1), (4, 1)]


def test_what_is_computed_again_for_the_backward_pass_is_logged_once(make, batches, history):
    look = Means()

    class Blocks(Net):
        def __init__(self, look):
            super().__init__(look)
            self.blocks = nn.ModuleList([Block(look)])

        def forward(self, batch):
            return self.head(self.blocks[0](batch)).square().mean()

    class Block(nn.Module):
        def __init__(self, look):
            super().__init__()
            self.layer, self.look = nn.Linear(4, 4), look

        def forward(self, batch):
            hidden = self.layer(batch)
            self.look(hidden)
            return hidden.tanh()

    backend = {"activation_checkpointing": "full"}
    make(look, model=lambda: Blocks(look), backend=backend).fit(batches)
    assert len(look.seen) == 8
    assert history.of("mean") == [(2, look.seen[2].item()), (4, look.seen[6].item())]


# Of torch's own look at what goes from one graph into the next.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_logs_as_well(make, batches, history):
    look = Means()
    make(look, backend={"compile": {"backend": "eager"}}).fit(batches)
    assert [step for step, _ in history.of("mean")] == [2, 4]


def test_values_are_not_needed(make, batches):
    trainer = make(Means(), device="meta")
    trainer.fit(batches)
    assert trainer.global_step == 4


def test_outside_of_a_run_nothing_happens(make, batches, history):
    net = Net(Means())
    net(batches[0])
    assert active_trainer() is None


def test_the_run_is_over_after_an_error(make, batches):
    def look(hidden):
        assert active_trainer() is trainer
        raise RuntimeError("no")

    trainer = make(look)
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(batches)
    assert active_trainer() is None


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda hidden: summarize_scalar("x", hidden), r"'x' has the shape \(8, 4\)"),
        (lambda hidden: summarize_scalar("x", "1"), "'x' is a str; it must be a number"),
        (lambda hidden: summarize_tensor("x", 1.0), "'x' is a float; it must be a tensor"),
    ],
)
def test_what_does_not_fit_is_refused(make, batches, look, message):
    with pytest.raises(ValueError, match=message):
        make(look).fit(batches)


class CallsAgain(Callback):
    """Call the model twice more in each training batch, within a name scope."""

    def on_train_step_start(self, trainer, model, batch):
        with trainer.name_scope("again"):
            model(batch)
            model(batch + 1)


def test_in_a_name_scope_the_first_value_counts_as_well(make, batches, history):
    make(Means(), callbacks=CallsAgain()).fit(batches)
    assert [step for step, _ in history.of("again/mean")] == [2, 4]
    assert history.of("again/mean") == history.of("mean")


def test_the_run_that_began_last_is_the_one_under_way():
    first, second = object(), object()
    with active(first), active(second):
        with active(first):
            assert active_trainer() is first
        assert active_trainer() is second
    assert active_trainer() is None
