"""The Trainer: a fixed sequence of hook calls."""

from __future__ import annotations

import logging as python_logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import Call, Progress
from modelzoo_trainer.base.devices import Backend
from modelzoo_trainer.callback import Batch, Loader, Metrics, Outputs, ValidationCallback
from modelzoo_trainer.core import (
    AutoRestart,
    Checkpoint,
    DataLoaderCallback,
    EarlyExit,
    GradientAccumulation,
    Interrupt,
    Logging,
    LoopCallback,
    LossAccumulation,
    ObjectStore,
    OptimizerCallback,
    Precision,
    Predicting,
    Reproducibility,
    RunSchedule,
    Summary,
    TrainingLoop,
    ValidationLoop,
)
from modelzoo_trainer.core.checkpoint import saving
from modelzoo_trainer.core.dataloader import NOTHING, require_step_boundary
from modelzoo_trainer.core.grad_accum import Weight, weight_of
from modelzoo_trainer.core.loop import require_training_loop, validation_loop_of
from modelzoo_trainer.core.model import ModelFactory, problem_of_loss, refuse_lost_loss, to_outputs
from modelzoo_trainer.core.optimizer import OptimizerFactory, SeveralGiven
from modelzoo_trainer.core.parts.core_callbacks import core_callbacks
from modelzoo_trainer.core.parts.manual_steps import ManualSteps
from modelzoo_trainer.core.parts.metrics import ValidationScopes
from modelzoo_trainer.core.parts.model_call import ModelCalls
from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.core.parts.named_checkpoints import paths_of
from modelzoo_trainer.core.parts.predictions import Predictions
from modelzoo_trainer.core.parts.results import RunResult, describe_trainer
from modelzoo_trainer.core.parts.run_context import close_at_exit, end_run, run_context, stop_scope
from modelzoo_trainer.core.parts.trainer_arguments import (
    check_arguments,
    check_progress,
    explain_missing,
)
from modelzoo_trainer.core.predicting import named_outputs
from modelzoo_trainer.core.run_schedule import ends_stage
from modelzoo_trainer.errors import ConfigError, RollBack, StopTraining
from modelzoo_trainer.hooks.global_callbacks import global_pairs, watch_global_callbacks
from modelzoo_trainer.hooks.interceptors import (
    InterceptableMethods,
    Interceptors,
    Pair,
    begin,
    class_pairs,
    end,
    event,
    is_own_pair,
    parted,
)
from modelzoo_trainer.hooks.logger import Logger
from modelzoo_trainer.hooks.order import (
    CallbackHandle,
    CallbackList,
    NotCopied,
    add_callback,
    remove_callback,
)
from modelzoo_trainer.hooks.spec import note_origin
from modelzoo_trainer.hooks.table import HookTable
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.loading.epochs import EpochIterator, as_loaders, one_loader, resolve_loader
from modelzoo_trainer.loading.train_data import explain_empty_validation, validation_batches

CkptPath = str | Path | EllipsisType | None
T = TypeVar("T")

_RUNS: Final = frozenset({"__init__", "fit", "validate", "validate_all", "test", "predict"})


class Trainer(NotCopied, InterceptableMethods):
    """Train and validate a model by calling the hooks of its callbacks in a fixed order.

    Args:
        device: "cpu", "cuda" (or "gpu"), "auto", ..., in any case; excludes a `backend` object.
        backend: A `backends.Backend`, or options for the backend of `device`.
        model_dir: The folder of all output; a path, or the URL of an object store such as
            `s3://bucket/runs/a`.
        model: A module, or a callable that returns one.
        call_model: "batch" = `model(batch)`, "kwargs" = `model(**batch)`, "args" =
            `model(*batch)`; None = decided at the first batch by the signature of `forward`.
        optimizer: An optimizer, a callable `model -> optimizer`, or None to only validate. For
            several optimizers a mapping of names to these, or a callable that returns one; override
            `training_step` to step them.
        schedulers: One or several schedulers, or callables `optimizer -> scheduler`; for several
            optimizers a mapping of their names to these.
        precision: None = full precision.
        sparsity: Which weights stay zero: a fraction, a mapping as in a configuration file, a list
            of these, or a callable that returns one of them; None = none.
        loop: None = one epoch, validated at its end.
        checkpoint: None = write none; load the newest one of `model_dir`.
        logging: None = every step.
        callbacks: Called after the core ones, in this order; may contain pairs such as
            `("post-forward", f)`: interceptors of methods that are marked as events.
        loggers: Receive metrics; called after `callbacks`.
        seed: Seed of all random number generators; None = the current seed of torch.
        autorestart: Automatic restarts, from the command line; None = none.
        object_store: Settings of object stores, for folders that are URLs; None = the defaults.
        check_loss: Add `CheckLoss()` after `callbacks`, unless there is a `CheckLoss`, a
            `TerminateOnNaN` or a `SpikeDetection` with `finite_only`. False = do not stop at a
            non-finite loss.
        progress: Console output: "bar", "lines" (at most one in 10 seconds), or "none" (only
            warnings and errors); None = a bar on a terminal and in a notebook, lines elsewhere.
            Adds a `ProgressLogger()` after `loggers`, unless there is a `ProgressLogger`, a
            `ProgressBar` or a `PrintProgress`.

    Raises:
        ConfigError: If an argument is invalid.
        HookError: If a callback does not fit the hooks.
    """

    # Attributes that core callbacks set; trainer_arguments.SET_BY says which.
    backend: Backend
    global_step: int
    model_dir: Path
    """The folder of all output; if that is a URL, its local copy."""
    artifact_dir: Path
    summary_dir: Path
    model: Module
    compiled_model: Module
    model_call: str | None = None
    """How the model is called, such as "model(**batch)"; None before the first batch."""
    optimizer: Optimizer
    schedulers: list[Any]
    manual_steps: ManualSteps | None = None
    """Runs `training_step` if there are several optimizers; None otherwise."""
    interrupted: str | None = None
    """What stopped the last fit early: "SIGINT", "stop file", "max_time", ...; None = nothing."""
    late_signal: str | None = None
    """The signal that arrived after the last step of the last fit."""
    raise_on_interrupt: bool = True
    """Whether `fit` raises KeyboardInterrupt or SystemExit after a graceful stop by a signal."""
    is_fitting: bool = False
    """Whether `fit` is running, its validations included."""
    is_resuming: bool = False
    """Whether a fit is loading its checkpoint: at its start, or when it rolls back."""
    unsaved_attributes: Collection[str] = ()
    """Names of attributes of a subclass that checkpoints exclude, such as a large fixed teacher."""
    is_from_file: bool = False
    """Whether a configuration file describes it, so that no method can be overridden."""
    metadata: list[dict[str, Any]] | None = None
    """Metadata of the loaded checkpoint. Set by ModelZooParamsMetadata."""
    val_is_complete: bool = True
    """Whether the validation covers all batches; False in `on_validate_end` after a stop."""
    is_log_step: bool = True
    """Whether metrics that are logged now reach the loggers."""
    hooks: HookTable
    """Calls the hooks of the callbacks; within a batch, the hooks of its kind of step."""
    rehearses: bool = False
    """Whether this batch is traced as on a log step, so that its graph is compiled early."""
    reads_outputs: tuple[str, ...] | None = None
    """Names of outputs that methods of a subclass read, of those computed only on request.

    None = all, if it overrides a method that gets the outputs, such as `compute_loss`; else none.
    """

    val_micro_batch_size: int | None = None
    """Maximum samples of a validation batch per forward pass; None = all."""

    def __init__(  # noqa: PLR0913  # one parameter per exchangeable part
        self,
        *,
        device: str | None = None,
        backend: Backend | Mapping[str, Any] | None = None,
        model_dir: str | Path = "model_dir",
        model: Module | ModelFactory | None = None,
        call_model: Call | None = None,
        optimizer: Optimizer | OptimizerFactory | SeveralGiven | None = None,
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
        object_store: ObjectStore | None = None,
        check_loss: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.progress = check_progress(progress)
        core = core_callbacks(
            {
                "device": device,
                "backend": backend,
                "model": model,
                "call_model": call_model,
                "optimizer": optimizer,
                "schedulers": schedulers,
                "precision": precision,
                "sparsity": sparsity,
                "loop": loop,
                "checkpoint": checkpoint,
                "logging": logging,
                "seed": seed,
                "autorestart": autorestart,
                "object_store": object_store,
            }
        )
        pairs, others = parted(callbacks)
        self.early_exit: EarlyExit = core["early_exit"]  # type: ignore[assignment]  # by name
        self.callbacks = CallbackList(
            core,
            others,
            loggers,
            check_loss=check_loss,
            shows_progress=progress != "none",
            on_stop=self.early_exit.request_stop,
        )
        self._bind_core()
        self.model_dir = self.object_store.bind(self.checkpoint, model_dir)
        self._val_scopes = ValidationScopes()
        self.interceptors = Interceptors(self, core.values(), pairs)
        self.val_iterator: EpochIterator | None = None
        self._is_closed = False
        self.hooks = self.callbacks.log_hooks
        self.interceptors.place(global_pairs())
        watch_global_callbacks(self)
        try:
            self.hooks.pre_setup(self)
            self.hooks.setup(self)
            self.callbacks.include_model_hooks(self.model)
            self.rebuild_hooks()  # set-up has decided what callbacks listen to
            self.hooks.post_setup(self)
        except BaseException as error:
            note_origin(error, self.all_callbacks, step=None)
            self.close()
            raise
        close_at_exit(self)

    def _bind_core(self) -> None:
        core: dict[str, Any] = self.callbacks.core
        self.reproducibility: Reproducibility = core["reproducibility"]
        self.precision: Precision = core["precision"]
        self.model_calls: ModelCalls = core["model"].calls
        self.data: DataLoaderCallback = core["dataloader"]
        self.optimizer_owner: OptimizerCallback = core["optimizer"]
        self.loop: LoopCallback = core["loop"]
        self.logging: Logging = core["logging"]
        self.predicting: Predicting = core["predicting"]
        self.grad_accum: GradientAccumulation = core["grad_accum"]
        self.loss_accum: LossAccumulation = core["loss_accum"]
        self.schedule: RunSchedule = core["run_schedule"]
        self.checkpoint: Checkpoint = core["checkpoint"]
        self.interruptions: Interrupt = core["interrupt"]
        self.autorestart: AutoRestart = core["autorestart"]
        self.object_store: ObjectStore = core["object_store"]
        self.summary: Summary = core["summary"]

    # ---- fit

    @event("fit", "train", passes_result=False)
    def fit(
        self,
        train_dataloader: Loader,
        val_dataloader: Loader | Sequence[Loader] | None = None,
        ckpt_path: CkptPath = ...,
    ) -> RunResult:
        """Train, and validate as configured by the loop.

        A signal stops the run gracefully: end hooks are called and the final checkpoint is written.
        Then Ctrl-C and SIGTERM are raised, to end the program, too; set `raise_on_interrupt` to
        False to return instead.

        Args:
            train_dataloader: An iterable of batches, such as a DataLoader or a list, or a callable
                that returns one.
            val_dataloader: One or several of the same; None = no validation. A list of
                tensors, tuples, mappings, or lists of tensors is one dataloader; a list of
                DataLoaders, callables or other iterables is several. A list of lists of tuples is
                ambiguous and refused: write `[lambda: first, lambda: second]`.
            ckpt_path: The checkpoint to start from: a path or a URL. Default: the newest one of
                `model_dir`; if this trainer has trained already, none, and a fit that was
                interrupted is continued. "last" = the newest, "best" = the best one of `SaveBest`.
                None = keep the current weights, and start a new fit.

        Returns:
            The last and best metrics, and what stopped the run; also `trainer.result`.

        Raises:
            KeyboardInterrupt: After Ctrl-C, when the run has stopped gracefully.
            SystemExit: After SIGTERM likewise, with exit code 143.
            ConfigError: If there is no optimizer or TrainingLoop, or a dataloader is invalid.
            CheckpointError: If the checkpoint cannot be loaded.
        """
        loop = require_training_loop(self.loop)
        with run_context(self, "fit") as stack:
            stack.callback(setattr, self, "is_fitting", False)
            self.is_fitting = True
            self.hooks.on_enter_fit(self, stack, train_dataloader, val_dataloader, loop)
            self._resume(ckpt_path)
            with stop_scope(self):
                self.hooks.on_fit_start(self, train_dataloader, val_dataloader, loop)
            val_dataloaders = self.number_val_dataloaders(
                as_loaders(val_dataloader, "val_dataloader")
            )
            with stop_scope(self):
                self._end_owed_epoch()
            for stage in self.schedule.stages(self):
                with stop_scope(self):
                    if stage.trains:
                        self._train(train_dataloader, loop)
                    else:
                        idx = self.schedule.loop_idx
                        self._validate_all(
                            val_dataloaders, [None], loop.val_loop, idx, stage.is_last
                        )
            self.hooks.on_fit_end(self, loop)
            self.drain()
            self.hooks.on_fit_committed(self, loop)
        return self._last_result

    def _train(self, train_dataloader: Loader, loop: TrainingLoop) -> None:
        loop_idx = self.schedule.loop_idx
        with run_context(self, "train") as stack:
            self.hooks.on_enter_train(self, stack, train_dataloader, loop, loop_idx)
            self.hooks.on_train_start(self, self.model, train_dataloader, loop, loop_idx)
            self.hooks.on_train_ready(self)
            is_over = False
            while not is_over:
                is_over = self._train_stage()
            self.hooks.on_train_end(self, self.model, loop, loop_idx)

    def _train_stage(self) -> bool:
        """Train until the stage ends (True) or is interrupted (False)."""
        try:
            while self.schedule.stage_continues(self):
                self._train_batch()
            self.drain()
        except StopTraining as stop:
            end_run(self, stop)
            self.hooks.on_step_discarded(self)
            return False  # reads may still be pending
        except RollBack as found:
            self.roll_back(found)
            return False
        finally:
            self.hooks = self.callbacks.log_hooks  # between steps everything is logged
        return True

    def _train_batch(self) -> None:
        data = self.data
        if data.begins_epoch:
            begin(self, "_epoch")
            self.hooks.on_train_epoch_start(self, data.epoch)
        batch = data.next_batch(self)
        if batch is NOTHING:  # the rest of the epoch is skipped
            self._end_epoch()
            return
        batch_idx = data.batch_idx - data.ends_batch
        self.hooks = self.logging.begin_batch(self)  # until the next batch
        self.hooks.on_train_batch_start(self, self.model, batch, batch_idx)
        manual = self.manual_steps
        outputs = self.training_step(batch) if manual is None else manual.run(self, batch)
        self.hooks.on_train_batch_end(self, self.model, outputs, batch, batch_idx)
        if self.grad_accum.should_run_optimizer_step:
            self.hooks.on_step_boundary(self)
            self.hooks.on_step_committed(self)
            if self.early_exit.is_asked:
                self.early_exit.check(self)
        if data.is_last:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self.hooks.on_train_epoch_end(self, self.data.epoch)
        end(self, "_epoch")
        self.data.end_epoch()

    @event("epoch")
    def _epoch(self) -> None:
        """The event of an epoch, which is not a method: it may contain validations."""

    @event("step")
    def training_step(self, batch: Batch) -> Outputs:
        """Run forward and backward on one batch, and step the optimizer on the last micro-step.

        Override it for several optimizers: compute losses, call `self.manual_backward(loss)` and
        `self.optimizer_step(name)`, and return the loss to log and check, or a mapping with it as
        "loss". It runs in autocast, and gradients are cleared after it.
        """
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
        raw = self.model_calls(self, batch, args, kwargs)
        if self.predicting.is_active:
            outputs = named_outputs(self.compute_predictions(named_outputs(raw), batch))
        else:
            outputs = to_outputs(raw)
            loss = self.compute_loss(outputs, batch)
            if loss is None:
                refuse_lost_loss(outputs, type(self))
            else:
                outputs["loss"] = loss
        self.hooks.on_after_forward(self, self.model, outputs, batch)
        return outputs

    @event("loss", keeps_result=True)
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Tensor | None:
        """Return the loss of a training or validation batch, or None if there is none.

        Args:
            outputs: The model's output, as a mapping.
            batch: The model's input.
        """
        return outputs.get("loss")

    def compute_predictions(self, outputs: Outputs, batch: Batch) -> Any:
        """Return what `predict` returns for a batch: one or several tensors, with a row per sample.

        By default all outputs; override it to select some, or to return `argmax` of the logits.

        Args:
            outputs: The model's output, as a mapping; a single tensor is named `output`.
            batch: The model's input.
        """
        return outputs

    @event("backward")
    def backward(self, outputs: Outputs, batch: Batch) -> None:
        """Compute the gradients of `outputs["loss"]`, added to the current ones."""
        self.hooks.on_before_backward(self, self.model, outputs)
        try:
            loss = outputs["loss"]
            if self.grad_accum.is_active:
                loss = self.grad_accum.scale(loss, outputs, batch)
            self.precision.backward(loss)
        except (KeyError, TypeError, AttributeError, RuntimeError):
            problem = problem_of_loss(self, outputs)
            if problem is not None:
                raise problem from None
            raise
        self.hooks.on_after_backward(self, self.model, outputs)

    def manual_backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, in a `training_step` with several optimizers.

        Raises:
            ConfigError: If there is only one optimizer, or it is called outside `training_step`.
        """
        self._manual_steps("manual_backward").backward(self, loss)

    @event("optimizer-step")
    def optimizer_step(self, name: str | None = None) -> None:
        """Clip the gradients and update the parameters.

        Args:
            name: Which of several optimizers; also steps its schedulers.
        """
        if name is not None:
            self._manual_steps("optimizer_step(name)").step(self, name)
            return
        optimizer = self.optimizer
        self.hooks.on_before_optimizer_step(self, self.model, optimizer)
        self.precision.optimizer_step(optimizer)
        self.hooks.on_after_optimizer_step(self, self.model, optimizer)

    @event("optimizer-zero-grad")
    def optimizer_zero_grad(self, name: str | None = None) -> None:
        """Clear the gradients.

        Args:
            name: Which of several optimizers.
        """
        if name is None:
            optimizer = self.optimizer
        else:
            optimizer = self._manual_steps("optimizer_zero_grad(name)").named(name)
        self.hooks.on_before_optimizer_zero_grad(self, self.model, optimizer)
        self.backend.zero_grad(optimizer)
        self.hooks.on_after_optimizer_zero_grad(self, self.model, optimizer)

    def _manual_steps(self, what: str) -> ManualSteps:
        if self.manual_steps is None:
            raise ConfigError(
                f"{what} requires several optimizers; this trainer has one. Pass a dict: "
                f"Trainer(optimizer={{name: lambda model: ...}})."
            )
        return self.manual_steps

    @event("schedulers-step")
    def schedulers_step(self) -> None:
        """Step every scheduler once."""
        for scheduler in self.schedulers:
            self.hooks.on_before_scheduler_step(self, self.model, self.optimizer, scheduler)
            scheduler.step()
            self.hooks.on_after_scheduler_step(self, self.model, self.optimizer, scheduler)

    # ---- validate

    @event("validate", "evaluate", passes_result=False)
    def validate(
        self,
        val_dataloader: Loader | None = None,
        ckpt_path: CkptPath = ...,
        loop: ValidationLoop | None = None,
    ) -> RunResult:
        """Validate on one dataloader.

        Args:
            val_dataloader: An iterable of batches, or a callable that returns one.
            ckpt_path: As in `fit`.
            loop: None = the trainer's.

        Returns:
            The metrics of this validation, without the prefix of the dataloader.

        Raises:
            ConfigError: If the dataloader is invalid or yields no batch.
            CheckpointError: If the checkpoint cannot be loaded.
        """
        loop = validation_loop_of(self.loop, loop)
        scope = self.get_val_dataloader_scope(val_dataloader)
        self._validate(val_dataloader, ckpt_path, loop, scope)
        return self._last_result

    @event("test", passes_result=False)
    def test(
        self, dataloader: Loader, ckpt_path: CkptPath = ..., eval_steps: int | None = None
    ) -> RunResult:
        """Validate on a test set; metrics are named `test/loss` and so on.

        Args:
            dataloader: An iterable of batches, or a callable that returns one.
            ckpt_path: As in `fit`.
            eval_steps: Batches, > 0; None = all, regardless of the trainer's loop.

        Returns:
            The metrics, without the prefix `test/`.

        Raises:
            ConfigError: If the dataloader is invalid or yields no batch.
            CheckpointError: If the checkpoint cannot be loaded.
        """
        with lengths_of(self.model):
            loader = one_loader(dataloader, "dataloader")
        self._validate(loader, ckpt_path, ValidationLoop(eval_steps), "test", "dataloader")
        return self._last_result

    @event("predict")
    def predict(
        self,
        dataloader: Loader,
        ckpt_path: CkptPath = ...,
        output_dir: str | Path | None = None,
        eval_steps: int | None = None,
        max_in_memory: int = 2**30,
    ) -> Predictions:
        """Return the model's outputs for a dataset in its order, gathered from all processes.

        The model runs as in a validation; no loss is required or computed. Every tensor with at
        least one dimension is kept; see `compute_predictions`.

        Args:
            dataloader: An iterable of batches, or a callable that returns one; not shuffled.
            ckpt_path: As in `fit`.
            output_dir: Write the outputs there, replacing earlier ones; read them with
                `Predictions.load`. None = in memory, or `predictions` in `model_dir` if too large.
            eval_steps: Batches, > 0; None = all.
            max_in_memory: Maximum bytes to return in memory, per process.

        Returns:
            Names and tensors with a row per sample, or lists if shapes differ; the same on all
            processes. A returned tensor is named `output`; the second of (loss, logits) `logits`.

        Raises:
            ConfigError: If the dataloader is invalid or empty, or the model returns only a loss.
            CheckpointError: If the checkpoint cannot be loaded.
            PredictionError: If files cannot be written.
        """
        with lengths_of(self.model):
            loader = one_loader(dataloader, "dataloader")
        loop = ValidationLoop(eval_steps, "predict")
        with self.predicting.collecting(self, output_dir, max_in_memory) as finish:
            self._validate(loader, ckpt_path, loop, "predict", "dataloader")
            with run_context(self, "validate"):
                found = finish()
        return found

    def _validate(
        self,
        val_dataloader: Loader,
        ckpt_path: CkptPath,
        loop: ValidationLoop,
        scope: str,
        name: str = "val_dataloader",
    ) -> None:
        with run_context(self, "validate") as stack:
            stack.enter_context(self.name_scope(scope))
            self.hooks = self.callbacks.log_hooks  # also if a callback validates within a step
            self.hooks.on_enter_validate(self, stack, val_dataloader, loop)
            self.load_checkpoint(ckpt_path)
            self.call(loop.on_start_hook, self.model, val_dataloader, loop)
            loader = resolve_loader(val_dataloader, name)
            check_model(loader, self.model)
            batches = validation_batches(
                loader,
                self.backend,
                self.global_step,
                self.val_micro_batch_size,
                loop.eval_steps,
                name,
            )
            stack.callback(batches.close)
            stack.callback(setattr, self, "val_iterator", self.val_iterator)
            self.val_iterator = batches
            self.val_is_complete = False
            self._validate_batches(batches, loop, name)
            self.val_is_complete = batches.is_last
            self.is_log_step = True
            self.call(loop.on_end_hook, self.model, loop)
            self.drain()

    def _validate_batches(self, batches: EpochIterator, loop: ValidationLoop, name: str) -> None:
        while not batches.is_last and not self.early_exit.check(self):
            batch_idx = batches.num_yielded
            batch = next(batches, None)
            if batches.num_yielded == 0:
                raise ConfigError(explain_empty_validation(name))
            self.is_log_step = self.logging.logs_batch(batch_idx, is_last=batches.is_last)
            self.call(loop.on_batch_start_hook, self.model, batch, batch_idx)
            outputs = self.validation_step(batch, loop, batch_idx)
            self.call(loop.on_batch_end_hook, self.model, outputs, batch, batch_idx)

    @event("validation-step")
    def validation_step(self, batch: Batch, loop: ValidationLoop, batch_idx: int = 0) -> Outputs:
        """Run forward on one batch, without gradients."""
        with self.backend.inference():
            return loop.step(self, batch, batch_idx)

    @event("validate-all", passes_result=False)
    def validate_all(
        self,
        val_dataloaders: Loader | Sequence[Loader] | None = None,
        ckpt_paths: CkptPath | Sequence[str | Path] = ...,
        loop: ValidationLoop | None = None,
    ) -> RunResult:
        """Validate several checkpoints on several dataloaders, then run the callbacks' validations.

        Args:
            val_dataloaders: One or several, as in `fit`.
            ckpt_paths: One or several paths, globs, or "last" and "best"; otherwise as in `fit`.
            loop: None = the trainer's.

        Returns:
            The metrics; with several checkpoints, each one's metrics are in `per_checkpoint`.

        Raises:
            ConfigError: If a dataloader is invalid, or a glob matches nothing.
            CheckpointError: If a checkpoint cannot be loaded, or there is none of that name.
        """
        paths = paths_of(self, ckpt_paths)
        loaders = self.number_val_dataloaders(as_loaders(val_dataloaders, "val_dataloaders"))
        self._validate_all(loaders, paths, validation_loop_of(self.loop, loop), None, True)
        return self._last_result

    def _validate_all(
        self,
        val_dataloaders: list[Loader],
        ckpt_paths: list[CkptPath],
        loop: ValidationLoop,
        loop_idx: int | None,
        is_last: bool,
    ) -> None:
        self.val_is_complete = True  # if there are no dataloaders
        with ExitStack() as stack:
            self.hooks.on_enter_validate_all(self, stack, val_dataloaders, loop, ckpt_paths)
            for ckpt_path in ckpt_paths:
                self.load_checkpoint(ckpt_path)
                first = 0 if loop_idx is None else self.schedule.num_validated
                for val_dataloader in val_dataloaders[first:]:
                    self.validate(val_dataloader, ckpt_path=None, loop=loop)
                    if not self.val_is_complete:
                        return
                    if loop_idx is not None:
                        self.schedule.count_validation()
                    if self.early_exit.should_exit:
                        return
                self.hooks.run_validation(self, loop_idx, is_last)

    # ---- checkpoints

    @event("save-checkpoint", "checkpoint")
    def save_checkpoint(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the current state and return its path.

        Args:
            wait: Until it is committed. If False, it is written in the background, and
                `on_after_save_checkpoint` is called at a later step boundary.

        Raises:
            CheckpointError: If it cannot be written (no partial one remains), or if it is called
                within a step or after an interrupted one: a resumed run would lose the batch.
        """
        require_step_boundary(self)
        self.drain()
        with saving(self, waits=True):
            state: dict[str, Any] = {}
            self.hooks.on_save_checkpoint(self, state)
            self.hooks.postprocess_checkpoint(self, state)
            path = self.checkpoint.write(self, self.backend.writable(state), wait=wait)
            self.checkpoint.report_committed(self)
        return path

    def after_save(self, committed: Iterable[Path]) -> None:
        """Call `on_after_save_checkpoint` for committed checkpoints."""
        for path in committed:
            self.hooks.on_after_save_checkpoint(self, path)

    @event("load-checkpoint")
    def load_checkpoint(self, ckpt_path: CkptPath = None) -> None:
        """Restore the state of a checkpoint.

        Args:
            ckpt_path: A path; Ellipsis (`...`) = the default of `fit`; None = no-op.

        Raises:
            CheckpointError: If it does not exist, is damaged, or does not fit.
        """
        path = self.checkpoint.choose(self, ckpt_path)
        self.hooks.on_before_load_checkpoint(self, path)
        if path is None:
            return
        with self.checkpoint.restoring(self, path) as state:
            self.hooks.preprocess_checkpoint(self, state)
            self.checkpoint.check_parts(self)
            self.hooks.on_load_checkpoint(self, state)

    def _resume(self, ckpt_path: CkptPath) -> None:
        self.is_resuming = True
        try:
            self.load_checkpoint(ckpt_path)
        finally:
            self.is_resuming = False

    def _end_owed_epoch(self) -> None:
        if self.data.owes_epoch_end:
            self.hooks.on_train_ready(self)
            self.hooks.on_train_epoch_end(self, self.data.epoch - 1)
            end(self, "_epoch")

    def roll_back(self, found: RollBack) -> None:
        """Load the newest intact checkpoint before a bad step, and skip the bad batches.

        Args:
            found: The bad step and its batches.

        Raises:
            BaseException: `found.cause`, if there is no such checkpoint.
        """
        path = self.checkpoint.to_roll_back_to(self, found.step)
        if path is None:
            raise found.cause
        self.hooks = self.callbacks.log_hooks
        self.hooks.on_rollback(self, path)
        self._resume(path)
        self.data.skip_batches(found.batches)
        self.hooks.on_train_ready(self)
        self._end_owed_epoch()

    # ---- callbacks

    def call(self, hook_name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a hook by name, declared or custom.

        Args:
            hook_name: The hook. A declared one gets this trainer as its first argument, and so do
                listeners of a custom one whose first parameter is named `trainer`.
            args: Arguments after the trainer.
            kwargs: Keyword arguments; listeners of a custom hook get those that they name.

        Raises:
            HookError: If the name looks like a misspelt declared hook without listeners, or the
                arguments do not fit.
        """
        self.hooks.call(self, hook_name, *args, **kwargs)

    def rebuild_hooks(self) -> None:
        """Rebuild the hook tables and reattach interceptors."""
        is_quiet = self.hooks is self.callbacks.quiet_hooks
        self.callbacks.rebuild()
        self.hooks = self.callbacks.quiet_hooks if is_quiet else self.callbacks.log_hooks
        self.interceptors.place(global_pairs())

    def add_callback(self, callback: Any) -> CallbackHandle:
        """Add a callback after others of its kind and set it up, or add an interceptor.

        Args:
            callback: A callback, a logger, or a pair such as `("post-forward", f)`.

        Returns:
            A handle with `remove()`.

        Raises:
            HookError: If it does not fit the hooks.
            ConfigError: If no object has the event of a pair, or its function does not fit.
        """
        return add_callback(self, callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, logger or pair. Idempotent."""
        remove_callback(self, callback)

    @property
    def loggers(self) -> list[Logger]:
        """The loggers, in order."""
        return self.callbacks.loggers

    def split_train_batches(self, micro_batch_size: int | None) -> None:
        """Train on micro-batches, whose gradients add up to the batch's gradient.

        Args:
            micro_batch_size: Maximum samples per forward pass, > 0; None = all.
        """
        self.data.split_batches(micro_batch_size)
        self.grad_accum.activate()
        self.loss_accum.activate()
        self.rebuild_hooks()

    @property
    def all_callbacks(self) -> Iterator[Any]:
        """All callbacks, in the order in which they are called."""
        return iter(self.callbacks.all)

    @property
    def validation_callbacks(self) -> list[ValidationCallback]:
        """The callbacks that run custom validations."""
        return self.get_callbacks(ValidationCallback)  # type: ignore[type-abstract]  # a filter

    def get_callbacks(self, kind: type[T]) -> list[T]:
        """Return all callbacks of a type, including global ones."""
        return [callback for callback in self.all_callbacks if isinstance(callback, kind)]

    def get_callback(self, kind: type[T]) -> T | None:
        """Return the first callback of a type, or None."""
        return next(iter(self.get_callbacks(kind)), None)

    def get_callback_name(self, callback: Any) -> str:
        """Return the name of one of this trainer's callbacks.

        Raises:
            ValueError: If it is not one of them.
        """
        return self.callbacks.name_of(callback)

    def stateful_callbacks(self) -> list[tuple[str, Any]]:
        """Return the callbacks that have a state, with their names in a checkpoint."""
        return self.callbacks.stateful()

    @override
    @classmethod
    def check_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        check_arguments(cls, args, kwargs)

    @override
    @classmethod
    def own_pairs(cls) -> tuple[Pair, ...]:
        return tuple(pair for pair in class_pairs(cls) if is_own_pair(cls, pair))

    @override
    def handle_stop(self, stop: StopTraining, attribute: str) -> None:
        if attribute in _RUNS:  # outside of a run, or at the end of a whole validation
            raise stop
        self.early_exit.request_stop(stop)

    # ---- values and metrics

    def read(
        self,
        tensors: Sequence[Tensor],
        deliver: Callable[[list[Any]], None],
        step: int | None = None,
    ) -> None:
        """Read values on the host as soon as they are available, without waiting for the device.

        Args:
            tensors: What to read; later changes have no effect.
            deliver: Called with the values: numbers, or CPU tensors if they have dimensions.
            step: The `global_step` during the delivery; None = the current batch's.
        """
        self.logging.read(self, tensors, deliver, step)

    def drain(self) -> None:
        """Deliver all pending reads, and what deliveries log. Waits for the device.

        Raises:
            RuntimeError: If deliveries keep logging without end.
        """
        self.logging.drain(self)

    def log_metrics(self, **metrics: Any) -> None:
        """Log metrics given by name; see `log_metrics_dict`."""
        self.log_metrics_dict(metrics)

    def log_metrics_dict(
        self,
        metrics: Metrics,
        step: int | None = None,
        dest: str | Sequence[str] | None = None,
    ) -> None:
        """Log metrics to all loggers and to `on_metrics`; a no-op unless `trainer.is_log_step`.

        In training, log steps are every `log_steps` of `Logging` and the last one; in a validation,
        every `log_steps` batches and the last one. `on_train_epoch_end` belongs to the step before
        it; in `on_train_end` and `on_fit_end` everything is logged. Names get the prefix of the
        open name scopes.

        Args:
            metrics: Names and values; tensors are read later, without waiting.
            step: None = the current step.
            dest: Names of loggers; only these get the metrics, not `on_metrics`. None = all.

        Raises:
            ValueError: If no logger has that name, or this batch has logged a metric of this name.
        """
        self.logging.log(self, metrics, step, dest)

    def remove_logger_destination(self, name: str) -> None:
        """Exclude loggers by name, unless `dest` names them."""
        self.logging.removed_destinations.add(name)

    def name_scope(self, name: str) -> AbstractContextManager[None]:
        """Prefix the names of all metrics logged inside.

        Args:
            name: One part of the path.
        """
        return self.logging.name_scope(name)

    @property
    def name_scope_path(self) -> str:
        """The open name scopes, joined and terminated by "/"; "" if there is none."""
        return self.logging.name_scope_path

    @property
    def is_delivering(self) -> bool:
        """Whether deferred reads are being delivered; `global_step` is then the step of these."""
        return self.logging.is_delivering

    def number_val_dataloaders(self, val_dataloaders: list[Loader]) -> list[Loader]:
        """Assign name scopes to dataloaders in this order, and return them."""
        return self._val_scopes.number(val_dataloaders)

    def get_val_dataloader_scope(self, val_dataloader: Loader) -> str:
        """Return the name scope of a validation dataloader, numbered when first seen."""
        return self._val_scopes.scope_of(val_dataloader)

    # ---- state of the run

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by name; a single one is named "optimizer"."""
        return self.optimizer_owner.optimizers

    @property
    def result(self) -> RunResult | None:
        """The result of the last `fit`, `validate`, ..., even if it failed; see `RunResult`."""
        return self.summary.result

    @property
    def _last_result(self) -> RunResult:
        assert self.summary.result is not None  # of the call that has just returned
        return self.summary.result

    def __repr__(self) -> str:
        return describe_trainer(self)

    @property
    def has_optimizer(self) -> bool:
        """Whether the trainer can train, not only validate."""
        return bool(self.optimizers)

    @property
    def should_run_optimizer_step(self) -> bool:
        """Whether the current batch is the last one of gradient accumulation."""
        return self.grad_accum.should_run_optimizer_step

    @property
    def is_padding(self) -> bool:
        """Whether this is a padding batch: only other ranks have data left."""
        return self.data.is_padding if self.val_iterator is None else self.val_iterator.is_padding

    @property
    def is_filler(self) -> bool:
        """Deprecated alias of `is_padding`."""
        return self.is_padding

    def weight_of(self, outputs: Outputs, batch: Batch) -> Weight:
        """Return the weight of the current batch in an average.

        Returns:
            `num_items` of the model's output, else the number of samples; 0 for a padding batch.
        """
        return 0 if self.is_padding else weight_of(outputs, batch)

    @property
    def is_first_iteration(self) -> bool:
        """Whether the current batch, or micro-batch of it, is the first one of its epoch."""
        if self.val_iterator is not None:
            return self.val_iterator.num_yielded <= 1
        return self.data.batch_idx <= self.data.ends_batch

    @property
    def is_final_iteration(self) -> bool:
        """Whether the current batch is the last one of its validation or train stage."""
        if self.val_iterator is not None:
            return self.val_iterator.is_last
        return ends_stage(self)

    @property
    def logger(self) -> python_logging.Logger:
        """The Python logger of this package."""
        return python_logging.getLogger("modelzoo_trainer")

    @property
    def is_tracing(self) -> bool:
        """Whether the code runs within a traced step."""
        return self.backend.in_step

    if not TYPE_CHECKING:  # else a checker would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(explain_missing(self, name))

    # ---- end

    def close(self) -> None:
        """Call `finalize` of every callback. Idempotent.

        Also called when the trainer is deleted, at exit, and at the end of a `with` block.
        """
        if not self._is_closed:
            self._is_closed = True
            try:
                self.hooks.finalize()
            finally:
                self.object_store.leave(self)  # with what callbacks have written last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "hooks" in self.__dict__:
            self.close()
