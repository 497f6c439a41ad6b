"""The Trainer: a fixed sequence of hook calls, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from modelzoo_trainer.advised_parts import AdvisedParts
from modelzoo_trainer.callback import Batch, Loader, Outputs
from modelzoo_trainer.core import (
    AutoRestart,
    Checkpoint,
    Logging,
    LoopCallback,
    Precision,
    TrainingLoop,
    ValidationLoop,
)
from modelzoo_trainer.core.dataloader import NOTHING
from modelzoo_trainer.core.model import ModelFactory, note_call, require_loss, to_outputs
from modelzoo_trainer.core.optimizer import OptimizerFactory
from modelzoo_trainer.devices import Backend, Stream
from modelzoo_trainer.errors import CheckpointError, ConfigError, RollBack, StopTraining
from modelzoo_trainer.hooks.spec import note_origin
from modelzoo_trainer.interceptors import begin, end, event
from modelzoo_trainer.loading.epochs import Pass, as_loaders, resolve_loader
from modelzoo_trainer.loading.train_data import validation_data
from modelzoo_trainer.loggers.logger import Logger

CkptPath = str | Path | EllipsisType | None


class Trainer(AdvisedParts):
    """Trains and validates a model by calling the hooks of its callbacks in a fixed order.

    Args:
        device: "cpu", "cuda" (or "gpu"), "auto", ..., in any case; excludes a `backend` object.
        backend: A `backends.Backend`, or options for that of `device`.
        model_dir: Where everything is written.
        model: A module, or a callable that returns one.
        optimizer: An optimizer, a callable `model -> optimizer`, or None to validate only.
        schedulers: One or several schedulers, or callables `optimizer -> scheduler`.
        precision: None = full precision.
        sparsity: Which weights stay zero: a fraction, a mapping as in a configuration file, a list
            of such, or a callable that returns one of these; None = none.
        loop: None = one pass over the data, validated at its end.
        checkpoint: None = none is written; the newest one of `model_dir` is loaded.
        logging: None = every step.
        callbacks: Called after the core ones, in this order; among them may be pairs such as
            `("post-forward", f)`, functions around the methods that are marked as events.
        loggers: Receive metrics; called after `callbacks`.
        seed: Seeds everything; None = whatever torch was seeded with.
        autorestart: Restarts of the command line; None = none.
        check_loss: Add `CheckLoss()` after `callbacks`, unless there is a `CheckLoss`, a
            `TerminateOnNaN` or a `SpikeDetection` with `finite_only`. False = a NaN or infinite
            loss does not stop the run.

    Raises:
        ConfigError: If something does not fit.
        HookError: If a callback does not fit.
    """

    def __init__(  # noqa: PLR0913  # one parameter for each exchangeable part
        self,
        *,
        device: str | None = None,
        backend: Backend | Mapping[str, Any] | None = None,
        model_dir: str | Path = "model_dir",
        model: Module | ModelFactory | None = None,
        optimizer: Optimizer | OptimizerFactory | None = None,
        schedulers: Any = None,
        precision: Precision | None = None,
        sparsity: object = None,
        loop: LoopCallback | None = None,
        checkpoint: Checkpoint | None = None,
        logging: Logging | None = None,
        callbacks: Iterable[Any] | Any = (),
        loggers: Iterable[Logger] | Logger = (),
        seed: int | None = None,
        autorestart: AutoRestart | None = None,
        check_loss: bool = True,
    ) -> None:
        super().__init__(
            model_dir,
            callbacks,
            loggers,
            check_loss=check_loss,
            core={
                "device": device,
                "backend": backend,
                "model": model,
                "optimizer": optimizer,
                "schedulers": schedulers,
                "precision": precision,
                "sparsity": sparsity,
                "loop": loop,
                "checkpoint": checkpoint,
                "logging": logging,
                "seed": seed,
                "autorestart": autorestart,
            },
        )

    # ---- fit

    @event("fit", "train")
    def fit(
        self,
        train_dataloader: Loader,
        val_dataloader: Loader | Sequence[Loader] | None = None,
        ckpt_path: CkptPath = ...,
    ) -> None:
        """Train, and validate as the loop says.

        A signal ends the run in order: end hooks are called and the final checkpoint is written.
        Then Ctrl-C and SIGTERM, which are for the whole program, are raised, so that nothing after
        this call runs unasked; set `raise_on_interrupt` to False to have it return instead.

        Args:
            train_dataloader: An iterable of batches, such as a DataLoader or a list, or a callable
                that returns one.
            val_dataloader: One or several likewise; None = no validation. A list whose elements
                are tensors, tuples, mappings, or lists of tensors is one dataloader, a list of
                batches; one with a DataLoader, a callable or another iterable is several. What may
                be either, a list of lists of tuples, is refused: write
                `[lambda: first, lambda: second]` for several lists of batches.
            ckpt_path: Start from this checkpoint; left out = from the newest one of `model_dir`
                if this trainer has not trained yet; None = from the weights as they are.

        Raises:
            KeyboardInterrupt: After Ctrl-C, when the run has ended in order.
            SystemExit: After SIGTERM likewise, with exit code 143.
            ConfigError: If there is no optimizer, the loop is none for training, or a dataloader
                cannot be used.
            CheckpointError: If the checkpoint cannot be used.
        """
        loop = self._training_loop()
        with self.interruptions.ending(self), ExitStack() as stack, self.on_exception("fit"):
            stack.callback(setattr, self, "is_fitting", False)
            self.is_fitting = True
            self.hooks.on_enter_fit(self, stack, train_dataloader, val_dataloader, loop)
            self._resume(ckpt_path)
            with self.early_exit.honouring_stops():
                self.hooks.on_fit_start(self, train_dataloader, val_dataloader, loop)
                self.early_exit.heed(self)
            val_dataloaders = self.number_val_dataloaders(
                as_loaders(val_dataloader, "val_dataloader")
            )
            with self.early_exit.honouring_stops():
                self._end_owed_epoch()
            if self.schedule.owes_validation(self):
                self.reproducibility.restore(self)
                self._validate_stage(val_dataloaders, loop)
            while self.schedule.has_steps_left(self):
                with self.early_exit.honouring_stops():
                    self._run_train(train_dataloader, loop)
                if self.schedule.validates and not self.early_exit.should_exit:
                    self._validate_stage(val_dataloaders, loop)
            self.hooks.on_fit_end(self, loop)
            self.drain()
            if self.schedule.is_finished(self) and not self.interruptions.will_raise(self):
                self.checkpoint.note_finished(self)

    def _run_train(self, train_dataloader: Loader, loop: TrainingLoop) -> None:
        loop_idx = self.schedule.loop_idx
        with ExitStack() as stack, self.on_exception("train"):
            self.schedule.begin_stage(self)
            self.hooks.on_enter_train(self, stack, train_dataloader, loop, loop_idx)
            self.hooks.on_train_start(self, self.model, train_dataloader, loop, loop_idx)
            self.reproducibility.restore(self)
            self.early_exit.heed(self)
            is_over = False
            while not is_over:
                is_over = self._train_stage()
            self.hooks.on_train_end(self, self.model, loop, loop_idx)

    def _train_stage(self) -> bool:
        """Train on; return whether the stage is over."""
        try:
            while self.schedule.stage_continues(self):
                self._train_batch()
            self.drain()
        except StopTraining as stop:
            self.early_exit.end(stop)
            self.data.give_back_window(self)
            self.grad_accum.drop(self)
            return False  # values may still be under way
        except RollBack as found:
            self.roll_back(found)
            return self.schedule.owes_validation(self)
        return True

    def _train_batch(self) -> None:
        data = self.data
        if data.begins_epoch:
            begin(self, "_epoch")
            self.hooks.on_train_epoch_start(self, data.epoch)
        batch = data.next_batch(self)
        if batch is NOTHING:
            return
        batch_idx = data.batch_idx - data.ends_batch
        self.hooks.on_train_batch_start(self, self.model, batch, batch_idx)
        outputs = self.training_step(batch)
        data.is_pending = False
        self.hooks.on_train_batch_end(self, self.model, outputs, batch, batch_idx)
        if self.grad_accum.should_run_optimizer_step:
            self.hooks.on_step_boundary(self)
            self.checkpoint.save_if_due(self)
            if self.early_exit.is_asked:
                self.early_exit.check(self)
        if data.is_last:
            self.hooks.on_train_epoch_end(self, data.epoch)
            end(self, "_epoch")
            data.end_epoch()
            self.early_exit.heed(self)

    @event("epoch")
    def _epoch(self) -> None:
        """Stand for an epoch, which is no call: validations may lie within it."""

    @event("step")
    def training_step(self, batch: Batch) -> Outputs:
        """Run one batch forward and backward, and the optimizer when its window is complete."""
        with self.backend.step(self.data.num_batches):
            self.hooks.on_train_step_start(self, self.model, batch)
            if self.grad_accum.should_run_optimizer_step:
                outputs = self.forward(batch)
                self.backward(outputs, batch)
                self.optimizer_step()
                self.optimizer_zero_grad()
                if self.schedulers:
                    self.schedulers_step()
            else:
                with self.backend.accumulating():
                    outputs = self.forward(batch)
                    self.backward(outputs, batch)
            self.hooks.on_train_step_end(self, self.model, outputs, batch)
        return outputs

    @event("forward")
    def forward(self, batch: Batch) -> Outputs:
        """Call the model and return its output as a mapping."""
        if self.precision.autocast is None:
            return self._call_model(batch)
        with self.precision.autocast:
            return self._call_model(batch)

    def _call_model(self, batch: Batch) -> Outputs:
        args: list[Any] = [batch]
        kwargs: dict[str, Any] = {}
        self.hooks.on_before_forward(self, self.model, batch, args, kwargs)
        try:
            raw = self.compiled_model(*args, **kwargs)
        except Exception as error:
            note_call(self, error, args, kwargs)
            raise
        outputs = to_outputs(raw)
        loss = self.compute_loss(outputs, batch)
        if loss is not None:
            outputs["loss"] = loss
        elif outputs.get("loss") is not None:
            raise ValueError(
                f"{type(self).__name__}.compute_loss returned None in place of the model's loss. "
                f"Return what the loss is to be, changed or not."
            )
        self.hooks.on_after_forward(self, self.model, outputs, batch)
        return outputs

    @event("loss", keeps_result=True)
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Tensor | None:
        """Return the loss of a batch, of training or validation; None if `outputs` has none either.

        Args:
            outputs: What the model has returned, as a mapping.
            batch: What it was called with.
        """
        return outputs.get("loss")

    @event("backward")
    def backward(self, outputs: Outputs, batch: Batch) -> None:
        """Add the gradients of `outputs["loss"]`."""
        self.hooks.on_before_backward(self, self.model, outputs)
        try:
            loss = outputs["loss"]
            if self.grad_accum.is_active:
                loss = self.grad_accum.scale(loss, outputs, batch)
            self.precision.backward(loss)
        except (KeyError, TypeError, AttributeError, RuntimeError):
            require_loss(self.model, outputs)
            raise
        self.hooks.on_after_backward(self, self.model, outputs)

    @event("optimizer-step")
    def optimizer_step(self) -> None:
        """Clip the gradients and update the parameters."""
        self.hooks.on_before_optimizer_step(self, self.model, self.optimizer)
        self.precision.optimizer_step(self.optimizer)
        self.hooks.on_after_optimizer_step(self, self.model, self.optimizer)

    @event("optimizer-zero-grad")
    def optimizer_zero_grad(self) -> None:
        """Drop the gradients."""
        self.hooks.on_before_optimizer_zero_grad(self, self.model, self.optimizer)
        self.backend.zero_grad(self.optimizer)
        self.hooks.on_after_optimizer_zero_grad(self, self.model, self.optimizer)

    @event("schedulers-step")
    def schedulers_step(self) -> None:
        """Step every scheduler once."""
        for scheduler in self.schedulers:
            self.hooks.on_before_scheduler_step(self, self.model, self.optimizer, scheduler)
            scheduler.step()
            self.hooks.on_after_scheduler_step(self, self.model, self.optimizer, scheduler)

    # ---- validate

    @event("validate", "evaluate")
    def validate(
        self,
        val_dataloader: Loader | None = None,
        ckpt_path: CkptPath = ...,
        loop: ValidationLoop | None = None,
    ) -> None:
        """Validate over one dataloader.

        Args:
            val_dataloader: An iterable of batches, or a callable that returns one.
            ckpt_path: As in `fit`.
            loop: None = the trainer's own.

        Raises:
            ConfigError: If the dataloader cannot be used or has no batch.
            CheckpointError: If the checkpoint cannot be used.
        """
        loop = self._validation_loop(loop)
        with (
            ExitStack() as stack,
            self.early_exit.honouring_stops(),
            self.on_exception("validate"),
        ):
            stack.enter_context(self.name_scope(self.get_val_dataloader_scope(val_dataloader)))
            self.hooks.on_enter_validate(self, stack, val_dataloader, loop)
            self.load_checkpoint(ckpt_path)
            self.call(loop.on_start_hook, self.model, val_dataloader, loop)
            loader = resolve_loader(val_dataloader, "val_dataloader")
            size = self.val_micro_batch_size
            batches = Pass(
                validation_data(loader, self.backend, self.global_step, size),
                self.backend.batches,
                limit=loop.eval_steps,
                micro_batch_size=size,
            )
            stack.callback(batches.close)
            stack.callback(setattr, self, "val_pass", self.val_pass)
            self.val_pass = batches
            self.val_is_complete = False
            self._validate_batches(batches, loop)
            self.val_is_complete = batches.is_last
            self.logging.gate_validation(self, 0, is_last=True)
            self.call(loop.on_end_hook, self.model, loop)
            self.drain()

    def _validate_batches(self, batches: Pass, loop: ValidationLoop) -> None:
        while not batches.is_last and not self.early_exit.check(self):
            batch_idx = batches.num_yielded
            batch = next(batches, None)
            if batches.num_yielded == 0:
                raise ConfigError(
                    "val_dataloader yields no batch. Check the data and the split; if it can be "
                    "iterated only once, pass a callable that makes it anew."
                )
            self.logging.gate_validation(self, batch_idx, is_last=batches.is_last)
            self.call(loop.on_batch_start_hook, self.model, batch, batch_idx)
            outputs = self.validation_step(batch, loop, batch_idx)
            self.call(loop.on_batch_end_hook, self.model, outputs, batch, batch_idx)

    @event("validation-step")
    def validation_step(self, batch: Batch, loop: ValidationLoop, batch_idx: int = 0) -> Outputs:
        """Run one batch forward, without gradients."""
        with self.backend.inference(), self.backend.step(batch_idx, Stream.VALIDATE):
            self.call(loop.on_step_start_hook, self.model, batch)
            outputs = self.forward(batch)
            self.call(loop.on_step_end_hook, self.model, outputs, batch)
        return outputs

    @event("validate-all")
    def validate_all(
        self,
        val_dataloaders: Loader | Sequence[Loader] | None = None,
        ckpt_paths: CkptPath | Sequence[str | Path] = ...,
        loop: ValidationLoop | None = None,
    ) -> None:
        """Validate several checkpoints over several dataloaders, then run validations of one's own.

        Args:
            val_dataloaders: One or several, as in `fit`.
            ckpt_paths: One or several paths or globs; otherwise as in `fit`.
            loop: None = the trainer's own.

        Raises:
            ConfigError: If a dataloader cannot be used, or a glob matches nothing.
            CheckpointError: If a checkpoint cannot be used.
        """
        paths = self.backend.broadcast_object(self.checkpoint.expand(ckpt_paths))
        loaders = self.number_val_dataloaders(as_loaders(val_dataloaders, "val_dataloaders"))
        self._validate_all(loaders, paths, self._validation_loop(loop), None, True)

    def _validate_stage(self, val_dataloaders: list[Loader], loop: TrainingLoop) -> None:
        schedule = self.schedule
        is_last = not schedule.has_steps_left(self)
        with self.early_exit.honouring_stops():
            self._validate_all(val_dataloaders, [None], loop.val_loop, schedule.loop_idx, is_last)
        is_cut = self.early_exit.should_exit or not self.val_is_complete
        schedule.end_stage(self, is_validated=not is_cut)
        if schedule.has_steps_left(self):
            self.early_exit.heed(self)

    def _validate_all(
        self,
        val_dataloaders: list[Loader],
        ckpt_paths: list[CkptPath],
        loop: ValidationLoop,
        loop_idx: int | None,
        is_last: bool,
    ) -> None:
        self.val_is_complete = True  # of no dataloaders
        with ExitStack() as stack:
            self.hooks.on_enter_validate_all(self, stack, val_dataloaders, loop, ckpt_paths)
            for ckpt_path in ckpt_paths:
                self.load_checkpoint(ckpt_path)
                first = 0 if loop_idx is None else self.schedule.num_validated
                for val_dataloader in val_dataloaders[first:]:
                    self.validate(val_dataloader, ckpt_path=None, loop=loop)
                    if not self.val_is_complete:
                        return
                    self.schedule.num_validated += loop_idx is not None
                    if self.early_exit.should_exit:
                        return
                self.hooks.run_validation(self, loop_idx, is_last)

    # ---- checkpoints

    @event("save-checkpoint", "checkpoint")
    def save_checkpoint(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the current state and return its path.

        Args:
            wait: Until it is committed; if not, it is written while training goes on, and
                `on_after_save_checkpoint` is called at a later step boundary.

        Raises:
            CheckpointError: If it cannot be written; there is none then, not half of one. Also
                within a step, or after one that an exception has cut off: its batch would be
                lost to a run that resumes.
        """
        if self.data.is_pending:
            raise CheckpointError(
                "save_checkpoint was called within a training step, whose batch would be lost to a "
                "run that resumes. Call it in on_train_batch_end or on_step_boundary."
            )
        if self.data.is_torn:
            raise CheckpointError(
                f"save_checkpoint: an error or a second Ctrl-C has left the step after "
                f"{self.global_step} half done; a run that resumed from here would not be what it "
                f"was. Load a checkpoint first; the weights are in trainer.model.state_dict()."
            )
        self.drain()
        self.checkpoint.finish(self)
        state: dict[str, Any] = {}
        self.hooks.on_save_checkpoint(self, state)
        self.hooks.postprocess_checkpoint(self, state)
        self.autorestart.add_state(self, state)
        path = self.checkpoint.write(self, self.backend.writable(state), wait=wait)
        self.after_save(self.checkpoint.take_committed())
        return path

    def after_save(self, committed: Iterable[Path]) -> None:
        """Tell everybody of checkpoints that have been committed."""
        for path in committed:
            self.autorestart.note_commit(path)
            self.hooks.on_after_save_checkpoint(self, path)
            self.autorestart.saved(self, path)

    @event("load-checkpoint")
    def load_checkpoint(self, ckpt_path: CkptPath = None) -> None:
        """Restore the state of a checkpoint.

        Args:
            ckpt_path: A path; Ellipsis = the newest one, if autoload is on and this trainer has
                not trained yet; None = nothing.

        Raises:
            CheckpointError: If it is not there, not intact, or belongs to something else.
        """
        path = self.checkpoint.choose(self, ckpt_path)
        self.hooks.on_before_load_checkpoint(self, path)
        if path is None:
            return
        state = self.checkpoint.read(self, path)
        with self.checkpoint.restoring(self):
            self.autorestart.loaded(self, state)
            self.hooks.preprocess_checkpoint(self, state)
            self.hooks.on_load_checkpoint(self, state)

    def _resume(self, ckpt_path: CkptPath) -> None:
        self.is_resuming = True
        try:
            self.load_checkpoint(ckpt_path)
        finally:
            self.is_resuming = False

    def _end_owed_epoch(self) -> None:
        if self.data.owes_epoch_end:
            self.reproducibility.restore(self)
            self.data.owes_epoch_end = False
            self.hooks.on_train_epoch_end(self, self.data.epoch - 1)
            end(self, "_epoch")

    def roll_back(self, found: RollBack) -> None:
        """Go back to the newest intact checkpoint from before a bad step, and past its data.

        Args:
            found: What was bad, and the batches that are left out from now on.

        Raises:
            BaseException: `found.cause`, if there is no checkpoint to go back to.
        """
        path = self.checkpoint.to_roll_back_to(self, found.step)
        if path is None:
            raise found.cause
        self.backend.reads.clear()
        self.logging.drop(self)
        self.grad_accum.drop(self)
        self._resume(path)
        self.data.pass_over(found.batches)
        self.reproducibility.restore(self)
        self._end_owed_epoch()
        self.schedule.begin_stage(self)

    # ---- which loop, and what happens on an error

    def _training_loop(self) -> TrainingLoop:
        if not isinstance(self.loop, TrainingLoop):
            raise ConfigError(
                f"fit needs a TrainingLoop, and the trainer has a {type(self.loop).__name__}. "
                f"Pass Trainer(loop=TrainingLoop(...))."
            )
        return self.loop

    def _validation_loop(self, loop: ValidationLoop | None) -> ValidationLoop:
        if loop is None:
            loop = self.loop.val_loop if isinstance(self.loop, TrainingLoop) else self.loop  # type: ignore[assignment]  # checked below
        if not isinstance(loop, ValidationLoop):
            raise ConfigError(f"validate needs a ValidationLoop, and got a {type(loop).__name__}.")
        return loop

    @contextmanager
    def on_exception(self, hook: str) -> Iterator[None]:
        """Call `on_{hook}_exception` of every callback when an exception leaves the block.

        Args:
            hook: "fit", "train" or "validate".
        """
        try:
            yield
        except StopTraining:
            raise  # no failure
        except BaseException as error:
            self.backend.explain(error)  # first: other processes are told, too
            try:
                self.drain()
            except Exception as late:  # noqa: BLE001  # the first error must win
                error.add_note(f"values that were under way: {type(late).__name__}: {late}")
            note_origin(error, self.all_callbacks, self.global_step)
            getattr(self.hooks, f"on_{hook}_exception")(self, error)
            raise
