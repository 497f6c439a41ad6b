"""Evaluation on the tasks of EleutherAI's lm-evaluation-harness during and after training."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Predicate
from typing_extensions import override

from modelzoo_trainer.base.constraints import Name, PositiveInt, checked
from modelzoo_trainer.callback import Loader, ValidationCallback
from modelzoo_trainer.callbacks.limit_batches import LimitBatches
from modelzoo_trainer.callbacks.model_ema import ModelEma
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.flags import ScopedEleutherEvalHarnessFlags
from modelzoo_trainer.zoo.evaluation.arguments import read_arguments
from modelzoo_trainer.zoo.evaluation.evaluation import Evaluation
from modelzoo_trainer.zoo.evaluation.model_facts import (
    longest_input,
    require_language_model,
    require_own_scores,
)
from modelzoo_trainer.zoo.evaluation.scoring import HOOK
from modelzoo_trainer.zoo.evaluation.tasks import messages_in_log, require_lm_eval
from modelzoo_trainer.zoo.evaluation.tokenizer import (
    check_vocabulary,
    choose_chat_template,
    load_tokenizer,
)

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.evaluation")

Scope = Annotated[Name, Predicate(lambda text: text.strip("/") == text), "a prefix such as 'eval'"]


class EleutherEvalHarness(ValidationCallback):
    """Evaluate the model on tasks of `lm_eval` after validations.

    Scores are as from `lm_eval --model hf` for the same weights and tokenizer: the same prompts,
    truncation, ending texts and metrics. Requests are divided among the processes; `lm_eval` runs
    in the main process. The random state of the run does not change.

    The tasks and their data are loaded at setup. A validation has the hooks
    `on_eleuther_eval_harness_start`, ..., and `ScopedEleutherEvalHarnessFlags` apply to it.
    Validations that `StepBasedEvaluation` adds do not count.

    Requires `pip install "modelzoo-trainer[eval]"`, and a model with `logits(input_ids)`,
    `vocab_size` and `max_position_embeddings`, such as the decoders of this package.

    Args:
        eeh_args: Arguments of `lm_eval`: `tasks` (required), `num_fewshot`, `limit`,
            `include_path`, `apply_chat_template`, ...; see "Evaluation" in the documentation.
        keep_data_dir: Accepted for compatibility; no effect, since requests stay in memory.
        every_n_vals: Run on every n-th validation of a run, > 0, and on the last one.
        flags: As in `ScopedEleutherEvalHarnessFlags`, for this evaluation only.
        name_scope: Prefix of the metrics; None = `eleuther_<n>`, counted from 0.
        batch_size: Rows per forward pass of each process; None = 1.
        data_dir: Accepted for compatibility; no effect.
        max_sequence_length: Maximum number of tokens of an input; longer ones lose the first
            tokens. None = `max_position_embeddings` of the model, or 2048 if it has no limit.
        tokenizer_file_path: A `tokenizer.json`; requires `eos_id`.
        eos_id: The token that ends a text; None = the tokenizer's.
        pretrained_model_name_or_path: Folder or Hub name of a tokenizer, instead of the file.
        shuffle: Accepted for compatibility; no effect, like the following ones.
        shuffle_seed: No effect.
        num_workers: No effect.
        prefetch_factor: No effect.
        persistent_workers: No effect.
        drop_last: No effect.
        averaged: Whether to evaluate the averaged weights of `ModelEma` instead of the model's.

    Metrics:
        eleuther_0/hellaswag/acc: Of a task or group, by the name of the metric; if a task filters
            answers, `exact_match_strict-match`. `..._stderr`: the standard error.

    Raises:
        ConfigError: If an argument is invalid; at setup, if `lm_eval` is missing, a task or
            tokenizer cannot be loaded, or the model does not fit.
    """

    needs_trainer = True

    @checked()
    def __init__(  # noqa: PLR0913  # the keys of its YAML section
        self,
        eeh_args: dict[str, Any],
        keep_data_dir: bool = False,
        every_n_vals: PositiveInt = 1,
        flags: dict[str, Any] | None = None,
        name_scope: Scope | None = None,
        batch_size: PositiveInt | None = None,
        data_dir: str | None = None,
        max_sequence_length: PositiveInt | None = None,
        tokenizer_file_path: Name | None = None,
        eos_id: Annotated[int, Ge(0)] | None = None,
        pretrained_model_name_or_path: Name | None = None,
        shuffle: bool | None = None,
        shuffle_seed: int | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        drop_last: bool | None = None,
        averaged: bool = False,
    ) -> None:
        self.arguments = read_arguments(eeh_args)
        if tokenizer_file_path is not None and pretrained_model_name_or_path is not None:
            raise ConfigError(
                "EleutherEvalHarness: tokenizer_file_path and pretrained_model_name_or_path are "
                "both given. Keep one of them."
            )
        if tokenizer_file_path is None and pretrained_model_name_or_path is None:
            raise ConfigError(
                "EleutherEvalHarness: there is no tokenizer. Set tokenizer_file_path and eos_id, "
                "or pretrained_model_name_or_path."
            )
        if tokenizer_file_path is not None and eos_id is None:
            raise ConfigError(
                "EleutherEvalHarness: tokenizer_file_path requires eos_id, the id of the token "
                "that ends a text. Set it."
            )
        self._every_n_vals = every_n_vals
        self._flags = None if flags is None else _flags_of(flags)
        self._name_scope = name_scope
        self._batch_size = batch_size or 1
        self._max_length = max_sequence_length
        self._is_averaged = averaged
        self._tokenizer = tokenizer_file_path, pretrained_model_name_or_path, eos_id
        given = {
            "keep_data_dir": keep_data_dir or None,
            "data_dir": data_dir,
            "shuffle": shuffle,
            "shuffle_seed": shuffle_seed,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "drop_last": drop_last,
        }
        self._idle = [key for key, value in given.items() if value is not None]
        self._evaluation: Evaluation | None = None
        self._is_running = False

    @property
    def notes(self) -> list[str]:
        """Arguments without effect."""
        found = []
        if self._idle:
            found.append(f"{', '.join(self._idle)}: no effect; requests are kept in memory.")
        of_flags = [] if self._flags is None else self._flags.notes
        return found + self.arguments.notes + of_flags

    # ---- when

    @property
    @override
    def name_scope(self) -> str:
        return self._name_scope or "eleuther_0"

    @property
    @override
    def every_n_vals(self) -> int:
        return self._every_n_vals

    @property
    @override
    def num_validate_loops(self) -> int:
        return 1

    # ---- set-up

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        require_lm_eval("EleutherEvalHarness")
        same = trainer.get_callbacks(EleutherEvalHarness)
        taken = [one._name_scope for one in same if one is not self]
        if self._name_scope is None:
            self._name_scope = f"eleuther_{same.index(self)}"
        if self._name_scope in taken:
            raise ConfigError(
                f"Two EleutherEvalHarness callbacks have the name_scope {self._name_scope!r}, so "
                f"their metrics would have the same names. Change one name_scope."
            )

        for other in same:
            folder = other._output_folder
            if other is not self and folder is not None and folder == self._output_folder:
                raise ConfigError(
                    f"Two EleutherEvalHarness callbacks have the folder "
                    f"{self.arguments.output_path!r} as eeh_args.output_path, where their results "
                    f"would have the same file names. Change one of them, or omit it."
                )

    @property
    def _output_folder(self) -> Path | None:
        given = self.arguments.output_path
        return None if given is None else Path(given).expanduser().resolve()

    @override
    def setup(self, trainer: Trainer) -> None:
        model: Any = trainer.model
        if not trainer.backend.caps.holds_values:
            return
        require_language_model(model)
        require_own_scores(model, self._batch_size)
        length = longest_input(model, self._max_length)
        tokenizer = load_tokenizer(*self._tokenizer)
        check_vocabulary(tokenizer, model)
        choose_chat_template(tokenizer, self.arguments.apply_chat_template)
        if self._is_averaged and trainer.get_callback(ModelEma) is None:
            raise ConfigError(
                "EleutherEvalHarness.averaged requires the callback ModelEma. Add it."
            )
        self._evaluation = Evaluation(
            self.arguments, tokenizer, max_length=length, batch_size=self._batch_size
        )
        self._load_tasks(trainer, self._evaluation)

    def _load_tasks(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Load tasks and data in the main process, so that a mistake is found now. Collective."""
        comm = trainer.backend.comm
        problem: str | None = None
        if comm.is_main:
            try:
                with messages_in_log("ERROR"):
                    evaluation.load(trainer.model, comm)
            except ConfigError as error:
                problem = str(error)
        problem = comm.broadcast_object(problem)
        if problem is not None:
            is_of_argument = problem.startswith("eeh_args")
            raise ConfigError(f"EleutherEvalHarness.{problem}" if is_of_argument else problem)

    # ---- validation

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        if self._is_running and self._flags is not None and loop.hook == HOOK:
            self._flags.on_enter_validate(trainer, stack, val_dataloader, loop)

    @override
    def run_validation(self, trainer: Trainer, loop_idx: int | None, is_last: bool) -> None:
        added = trainer.get_callback(StepBasedEvaluation)
        if added is not None and loop_idx is not None:
            if added.is_intermediate(trainer):
                return
            loop_idx = added.own_idx(trainer)
        if self._evaluation is None or not self.is_due(loop_idx, is_last):
            return
        folder = self._output_folder or trainer.artifact_dir / self.name_scope
        ema = trainer.get_callback(ModelEma) if self._is_averaged else None
        if ema is not None and not ema.has_average:
            log.warning("%s: not evaluated; there are no averaged weights yet.", self.name_scope)
            return
        with ExitStack() as stack:
            if ema is not None:
                stack.enter_context(ema.swap())
            trainer.logging.open_handlers(trainer, stack)  # outside a fit, they are not open
            stack.callback(setattr, self, "_is_running", False)
            self._is_running = True
            metrics = self._evaluation.run(trainer, folder, self._most_documents(trainer))
        if metrics is not None:
            trainer.log_metrics_dict(metrics)

    def _most_documents(self, trainer: Trainer) -> int | None:
        limits = [one.num_batches for one in trainer.get_callbacks(LimitBatches)]
        return min(limits) * self._batch_size if limits else None


def _flags_of(flags: dict[str, Any]) -> ScopedEleutherEvalHarnessFlags:
    try:
        return ScopedEleutherEvalHarnessFlags(**flags)
    except ConfigError as error:
        text = str(error).replace("ScopedEleutherEvalHarnessFlags", "EleutherEvalHarness.flags")
        raise ConfigError(text) from None
