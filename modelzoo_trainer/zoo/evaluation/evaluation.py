"""One evaluation of the model of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelzoo_trainer.base.devices import hold_lm_eval_in_process
from modelzoo_trainer.errors import ConfigError, reason_of
from modelzoo_trainer.zoo.evaluation import decoding
from modelzoo_trainer.zoo.evaluation.adapter import SCORING, EvaluationFacts, adapter_class
from modelzoo_trainer.zoo.evaluation.arguments import HarnessArguments
from modelzoo_trainer.zoo.evaluation.decoding import DecodingLoop
from modelzoo_trainer.zoo.evaluation.model_facts import generation_settings
from modelzoo_trainer.zoo.evaluation.processes import Interrupted, Processes
from modelzoo_trainer.zoo.evaluation.results import log, metrics_of, table_of, write_results
from modelzoo_trainer.zoo.evaluation.rows import BatchLayout, RaggedRows, make_batches
from modelzoo_trainer.zoo.evaluation.scoring import ScoringLoop, ScoringPlan
from modelzoo_trainer.zoo.evaluation.tasks import LoadedTasks, messages_in_log

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Comm
    from modelzoo_trainer.trainer import Trainer


class Evaluation:
    """Evaluates the model of a run with `lm_eval`; collective with several processes.

    Args:
        arguments: The arguments of `lm_eval`.
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens of an input.
        batch_size: Rows per forward pass of each process.
    """

    def __init__(
        self,
        arguments: HarnessArguments,
        tokenizer: Any,
        *,
        max_length: int,
        batch_size: int,
    ) -> None:
        self._arguments = arguments
        self._tasks: LoadedTasks | None = None
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._batch_size = batch_size

    def run(
        self, trainer: Trainer, folder: Path, most: int | None = None
    ) -> dict[str, float] | None:
        """Return the metrics, on all processes; None if the run was stopped meanwhile.

        The random state of the run does not change. If `lm_eval` fails during a fit, as in a metric
        of a task, that is logged, there are no metrics, and training continues.

        Args:
            trainer: The trainer.
            folder: Where results are written.
            most: Maximum number of documents of each task, besides the arguments' limit.

        Raises:
            ConfigError: If `lm_eval` fails outside of a fit.
        """
        backend = trainer.backend
        state = backend.rng_state()
        restore = hold_lm_eval_in_process()
        processes = Processes(backend.comm, partial(self._perform, trainer))
        metrics: dict[str, float] | None = None
        try:
            if backend.comm.is_main:
                with processes.leading():
                    metrics = self._lead_or_log(trainer, processes, folder, most)
            else:
                processes.serve()
        except Interrupted:
            pass
        finally:
            restore()
            backend.set_rng_state(state)
        found: dict[str, float] | None = backend.comm.broadcast_object(metrics)
        return found

    def load(self, model: Any, comm: Comm) -> None:
        """Load the tasks and their data; called by the main process only, before `run`.

        Raises:
            ConfigError: If a task cannot be loaded, or evaluated here.
        """
        self._tasks = LoadedTasks(self._arguments)
        adapter = self._adapter(model, Processes(comm, lambda kind, values: {}))
        own = self._arguments.sampling or {}
        for task in self._tasks:
            if task.OUTPUT_TYPE == "generate_until":
                adapter.check_generation({**(task.get_config("generation_kwargs") or {}), **own})

    def _adapter(self, model: Any, processes: Processes) -> Any:
        adapter = adapter_class()()
        facts = EvaluationFacts(
            tokenizer=self._tokenizer,
            max_length=self._max_length,
            batch_size=self._batch_size,
            seed=self._arguments.seeds[2] or 0,
            ends=generation_settings(model)[0],
        )
        adapter.prepare(facts, processes)
        return adapter

    def _lead_or_log(
        self, trainer: Trainer, processes: Processes, folder: Path, most: int | None
    ) -> dict[str, float] | None:
        try:
            return self._lead(trainer, processes, folder, most)
        except Interrupted:
            raise
        except Exception as error:  # whatever the code of a task raises
            if processes.is_busy:  # not lm_eval: the model failed
                raise
            problem = (
                error
                if isinstance(error, ConfigError)
                else ConfigError(
                    f"EleutherEvalHarness: lm_eval failed ({reason_of(error).rstrip('.')}). "
                    f"Correct the task, or remove it from eeh_args.tasks."
                )
            )
            if not trainer.is_fitting:
                raise problem from error
            step = trainer.global_step
            log.debug("lm_eval failed.", exc_info=error)
            log.error("%s There are no results of step %d; training continues.", problem, step)
            return None

    def _lead(
        self, trainer: Trainer, processes: Processes, folder: Path, most: int | None
    ) -> dict[str, float]:
        """Run `lm_eval` in the main process."""
        from lm_eval.evaluator import simple_evaluate

        arguments = self._arguments
        adapter = self._adapter(trainer.model, processes)
        _, ignored = generation_settings(trainer.model)
        if ignored:
            log.warning(
                "%s of the model's generation_config: not applied to tasks that generate text.",
                ", ".join(ignored),
            )
        assert self._tasks is not None  # loaded in the main process
        with messages_in_log(arguments.verbosity):
            results = simple_evaluate(
                model=adapter,
                tasks=self._tasks.names,
                task_manager=self._tasks,
                batch_size=self._batch_size,
                device=str(trainer.backend.device),
                **arguments.for_lm_eval(most),
            )
        samples = results.pop("samples", None)
        log.info("Results at step %d:\n%s", trainer.global_step, table_of(results))
        if arguments.show_config:
            log.info("Configuration of the tasks: %s", results.get("configs"))
        write_results(folder, results, trainer.global_step, samples)
        return metrics_of(results)

    def _perform(self, trainer: Trainer, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """Do this process's part of a work: a validation with batches of it."""
        extra: dict[str, Any] = {}
        room = 0
        loop: ScoringLoop | DecodingLoop
        if kind == SCORING:
            plan = ScoringPlan.unpack(values)
            rows, extra, loop = plan.rows, {"last": plan.last}, ScoringLoop(plan)
        else:
            rows, sampling = decoding.unpack(values)
            room = sampling.max_new_tokens
            loop = DecodingLoop(sampling, self._tokenizer.decode)
        if len(rows):
            self._validate(trainer, rows, extra, loop, room)
        return loop.results

    def _validate(
        self,
        trainer: Trainer,
        rows: RaggedRows,
        extra: dict[str, Any],
        loop: ScoringLoop | DecodingLoop,
        room: int,
    ) -> None:
        backend = trainer.backend
        layout = BatchLayout(
            batch_size=self._batch_size,
            num_shards=backend.comm.data_shard[1],
            room=room,
            limit=self._max_length,
            is_static=backend.caps.static_shapes,
        )
        batches = make_batches(rows, extra, layout)
        trainer.validate(batches, ckpt_path=None, loop=loop)
        if not trainer.val_is_complete:
            raise Interrupted
