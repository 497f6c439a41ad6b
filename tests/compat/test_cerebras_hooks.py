"""The Model Zoo's hooks, callbacks of one's own, and what of its trainer is otherwise here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelzoo_trainer import (
    HOOKS,
    Callback,
    Logging,
    ValidationCallback,
    ValidationLoop,
    register_global_callback,
    summarize_scalar,
    summarize_tensor,
)
from modelzoo_trainer.callbacks import CheckLoss, ModelEvalMetrics
from modelzoo_trainer.hooks.foreign import OF_CEREBRAS
from tests.doubles import (
    History,
    TinyModel,
    constant_batches,
    differing,
    tiny_batches,
    weights_of,
)
from tests.doubles import Scale as OneWeight

DATALOADERS = "train_dataloader, val_dataloader, loop"
OPTIMIZER = "trainer, model, optimizer"
SCHEDULER = "trainer, model, optimizer, scheduler"
BATCH = "trainer, model, batch, batch_idx"
OUTPUTS = "trainer, model, outputs"
THEIRS = {
    "pre_setup": "trainer",
    "setup": "trainer",
    "post_setup": "trainer",
    "finalize": "",
    "on_enter_fit": f"trainer, stack, {DATALOADERS}",
    "on_fit_start": f"trainer, {DATALOADERS}",
    "on_fit_end": "trainer, loop",
    "on_fit_exception": "trainer, exception",
    "on_enter_train": "trainer, stack, train_dataloader, loop, loop_idx",
    "on_train_start": "trainer, model, train_dataloader, loop, loop_idx",
    "on_train_end": "trainer, model, loop, loop_idx",
    "on_train_exception": "trainer, exception",
    "on_train_step_start": "trainer, model, batch",
    "on_train_step_end": f"{OUTPUTS}, batch",
    "on_train_batch_start": BATCH,
    "on_train_batch_end": f"{OUTPUTS}, batch, batch_idx",
    "run_validation": "trainer, loop_idx, is_last",
    "on_enter_validate": "trainer, stack, val_dataloader, loop",
    "on_validate_start": "trainer, model, val_dataloader, loop",
    "on_validate_end": "trainer, model, loop",
    "on_validate_exception": "trainer, exception",
    "on_validate_step_start": "trainer, model, batch",
    "on_validate_step_end": f"{OUTPUTS}, batch",
    "on_validate_batch_start": BATCH,
    "on_validate_batch_end": f"{OUTPUTS}, batch, batch_idx",
    "on_enter_validate_all": "trainer, stack, val_dataloaders, loop, ckpt_paths",
    "on_before_forward": "trainer, model, batch, args, kwargs",
    "on_after_forward": f"{OUTPUTS}, batch",
    "on_before_backward": OUTPUTS,
    "on_after_backward": OUTPUTS,
    "on_before_optimizer_step": OPTIMIZER,
    "on_after_optimizer_step": OPTIMIZER,
    "on_before_optimizer_zero_grad": OPTIMIZER,
    "on_after_optimizer_zero_grad": OPTIMIZER,
    "on_before_scheduler_step": SCHEDULER,
    "on_after_scheduler_step": SCHEDULER,
    "on_save_checkpoint": "trainer, state_dict",
    "on_save_trainer_state": "trainer, state_dict",
    "on_after_save_trainer_state": "trainer, trainer_state_file",
    "postprocess_checkpoint": "trainer, state_dict",
    "on_after_save_checkpoint": "trainer, ckpt_path",
    "on_before_load_checkpoint": "trainer, ckpt_path",
    "preprocess_checkpoint": "trainer, state_dict",
    "on_load_checkpoint": "trainer, state_dict",
    "on_load_trainer_state": "trainer, state_dict",
}


def test_the_hooks_are_the_same_and_a_few_more():
    assert len(THEIRS) == 45
    declared = {name: ", ".join(hook.parameters) for name, hook in HOOKS.items()}
    assert {name: params for name, params in declared.items() if name in THEIRS} == THEIRS
    assert THEIRS.keys() == OF_CEREBRAS


def test_the_page_of_the_hooks_marks_those_that_are_added() -> None:
    page = Path(__file__).parents[2] / "docs/reference/hooks.md"
    sections = page.read_text(encoding="utf-8").split("\n## ")[1:]
    marked = {text.split("\n")[0] for text in sections if "*, *added*" in text}
    assert marked == {name for name in vars(Callback) if name in HOOKS} - THEIRS.keys()


# ---- the documentation's examples


def example_of_the_page():
    """Return the class in the first program of the page."""
    page = Path(__file__).parents[2] / "docs/from_cerebras.md"
    code = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("\ntrainer = ")[0]
    scope = {}
    exec(code, scope)
    return scope["ScaledLoss"]


class Gradients(Callback):
    def __init__(self):
        self.found = []

    def on_after_backward(self, trainer, model, outputs):
        self.found.append(model.head.weight.grad.clone())


def test_a_callback_of_ones_own_scales_the_loss(trainer_of, tmp_path):
    scale = example_of_the_page()(1024.0)
    plain, scaled, logged = Gradients(), Gradients(), [History(), History()]
    first = trainer_of(plain, loggers=logged[0], max_steps=3)
    second = trainer_of(
        scale, scaled, loggers=logged[1], max_steps=3, model_dir=tmp_path / "scaled"
    )
    first.fit(tiny_batches())
    second.fit(tiny_batches())
    assert torch.equal(scaled.found[0], plain.found[0] * 1024)
    assert differing(weights_of(first), weights_of(second)) == []
    assert logged[1].of("loss") == logged[0].of("loss")


def bad_batches():
    return constant_batches(1, float("nan"))


@pytest.mark.parametrize("form", ["with", "handle", "class"])
def test_check_loss_may_be_global(trainer_of, tmp_path, form):
    def fit(name):
        settings = {"model": OneWeight, "max_steps": 2, "check_loss": False}
        trainer_of(model_dir=tmp_path / name, **settings).fit(bad_batches())

    fit("before")
    if form == "with":
        with CheckLoss(), pytest.raises(FloatingPointError, match="loss is nan at global_step 2"):
            fit("global")
    else:
        own = type("Own", (CheckLoss,), {})
        made = register_global_callback(own() if form == "handle" else own)
        handle = made if form == "handle" else own.global_callback_handle
        assert form == "handle" or made is own
        try:
            with pytest.raises(FloatingPointError, match="loss is nan at global_step 2"):
                fit("global")
        finally:
            handle.remove()
    fit("after")


def test_the_order_is_core_user_loggers_global(trainer_of):
    order = []

    def noting(name, base=Callback):
        class Notes(base):
            def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
                order.append((name, trainer.global_step))

        return Notes()

    trainer = trainer_of(noting("first"), noting("second"), loggers=noting("logger", History))
    with noting("global"):
        trainer.fit(tiny_batches(1))
    assert order == [("first", 1), ("second", 1), ("logger", 1), ("global", 1)]
    names = list(trainer.callbacks)
    assert names.index("checkpoint") < names.index("Notes") < names.index("Notes_2")


@pytest.mark.slow
def test_metrics_of_torchmetrics_are_logged_by_their_names(trainer_of):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Classifier(TinyModel):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.classification.BinaryAccuracy()

        def forward(self, batch):
            loss, logits = super().forward(batch)
            if not self.training:
                self.accuracy.update(logits, (batch[1] > 0).int())
            return loss, logits

    history = History()
    trainer = trainer_of(ModelEvalMetrics(), model=Classifier, loggers=history, num_steps=1)
    batches = tiny_batches(4, seed=5)
    trainer.fit(tiny_batches(), batches)
    with torch.no_grad():
        right = [
            ((trainer.model(batch)[1].sigmoid() > 0.5) == (batch[1] > 0)).float()
            for batch in batches
        ]
    assert history.of("validate_0/accuracy") == [(1, pytest.approx(torch.cat(right).mean().item()))]


# ---- functions and bases


class Summarizing(TinyModel):
    def forward(self, batch):
        loss, logits = super().forward(batch)
        summarize_scalar("twice", loss.detach() * 2)
        summarize_tensor("logits", logits.detach())
        return loss, logits


def test_c_summarize_scalar__logs_from_within_the_model(trainer_of):
    history = History()
    trainer = trainer_of(
        model=Summarizing, loggers=history, logging=Logging(log_steps=2), max_steps=4
    )
    trainer.fit(tiny_batches(), tiny_batches(1))
    losses = dict(history.of("loss"))
    assert history.of("twice") == [(step, pytest.approx(2 * losses[step])) for step in (2, 4)]
    assert [step for step, _ in history.of("validate_0/twice")] == [4]


def test_c_summarize_scalar__outside_of_a_run_does_nothing():
    loss, _ = Summarizing()(tiny_batches(1)[0])
    assert loss.isfinite()


def test_c_summarize_tensor__logs_the_whole_tensor(trainer_of):
    history = History()
    batches = tiny_batches(1)
    trainer = trainer_of(model=Summarizing, loggers=history, num_steps=1)
    with torch.no_grad():
        expected = trainer.model(batches[0])[1]
    trainer.fit(batches)
    ((_, value),) = history.of("logits")
    torch.testing.assert_close(torch.as_tensor(value), expected)


def test_c_validation_callback__runs_after_the_dataloaders(trainer_of):
    class Own(ValidationCallback):
        name_scope = "own"
        every_n_vals = 2
        num_validate_loops = 1

        def run_validation(self, trainer, loop_idx, is_last):
            if self.is_due(loop_idx, is_last):
                trainer.validate(tiny_batches(1), ckpt_path=None, loop=ValidationLoop())

    history = History()
    own = Own()
    trainer = trainer_of(own, loggers=history, max_steps=3, eval_frequency=1)
    trainer.fit(tiny_batches(), tiny_batches(1))
    assert trainer.validation_callbacks == [own]
    assert [step for step, _ in history.of("validate_0/loss")] == [1, 2, 3]
    found = [step for step, line in history.lines if any(k.startswith("own/") for k in line)]
    assert found == [2, 3]
