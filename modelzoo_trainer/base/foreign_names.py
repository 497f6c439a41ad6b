"""Names of other trainers, and what to use instead."""

from typing import Final

_DEVICE: Final = 'device="cuda" (or "cpu", "auto")'
_PROCESSES: Final = 'torchrun --nproc-per-node=N, and backend={"parallel": {...}} for sharding'
_LOADERS: Final = "trainer.fit(train_dataloader, val_dataloader), with DataLoaders"
_OPTIMIZERS: Final = "optimizer= and schedulers="
_OPTIMIZER: Final = "optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=...)"
_SCHEDULERS: Final = "schedulers=lambda optimizer: ..., such as a scheduler of torch"
_CHECKPOINTS: Final = "checkpoint=Checkpoint(epochs=1), or Checkpoint(steps=...)"

TRAINER_ARGUMENTS: Final = {
    "accelerator": _DEVICE,
    "args": "model_dir=, loop=TrainingLoop(...), checkpoint=Checkpoint(...) and logging=Logging()",
    "barebones": 'progress="none"',
    "benchmark": "torch.backends.cudnn.benchmark, before the trainer is made",
    "check_val_every_n_epoch": 'loop=TrainingLoop(eval_frequency="epoch")',
    "compute_loss_func": "Trainer.compute_loss(outputs, batch), overridden",
    "compute_metrics": "the callback ModelEvalMetrics, for metrics that the model returns",
    "data_collator": "DataLoader(collate_fn=...)",
    "default_root_dir": "model_dir=",
    "deterministic": "torch.use_deterministic_algorithms, before the trainer is made",
    "devices": _PROCESSES,
    "enable_checkpointing": "checkpoint=Checkpoint(...); without it none is written",
    "enable_progress_bar": 'progress="none"',
    "eval_dataset": _LOADERS,
    "eval_strategy": 'loop=TrainingLoop(eval_frequency="epoch"), or a number of steps',
    "fast_dev_run": "loop=TrainingLoop(max_steps=1, eval_steps=1)",
    "learning_rate": _OPTIMIZER,
    "limit_test_batches": "trainer.test(dataloader, eval_steps=...)",
    "limit_train_batches": "the callback LimitBatches, or loop=TrainingLoop(steps_per_epoch=)",
    "limit_val_batches": "loop=TrainingLoop(eval_steps=...)",
    "logger": "loggers=",
    "lr": _OPTIMIZER,
    "lr_scheduler": "schedulers=",
    "lr_scheduler_type": _SCHEDULERS,
    "num_nodes": _PROCESSES,
    "optim": _OPTIMIZER,
    "optimizers": _OPTIMIZERS,
    "output_dir": "model_dir=",
    "processing_class": _LOADERS,
    "profiler": "the callback OpProfiler",
    "report_to": "loggers=, such as loggers=[WandbLogger()]",
    "save_steps": _CHECKPOINTS,
    "save_strategy": _CHECKPOINTS,
    "save_total_limit": "the callback KeepNCheckpoints(n=...)",
    "strategy": _PROCESSES,
    "sync_batchnorm": "the callback ConvertSyncBatchNorm",
    "tokenizer": _LOADERS,
    "train_dataset": _LOADERS,
    "val_check_interval": "loop=TrainingLoop(eval_frequency=...)",
    "warmup_ratio": _SCHEDULERS,
    "warmup_steps": _SCHEDULERS,
    "weight_decay": _OPTIMIZER,
}
"""Arguments of other trainers that have another form here."""

_WATCH: Final = {
    "early_stopping_patience": "patience=",
    "early_stopping_threshold": "min_delta=",
    "metric_for_best_model": "metric=",
    "monitor": "metric=",
    "restore_best_weights": "SaveBest(metric=..., load_best=True)",
    "threshold": "min_delta=",
}
_BEST: Final = {
    "dirpath": "Checkpoint(checkpoint_root=...)",
    "filename": 'checkpoint_name="best_{step}"',
    "metric_for_best_model": "metric=",
    "monitor": "metric=",
    "save_top_k": "k=",
    "save_weights_only": 'checkpoint_states="model"',
}
_LOOP: Final = {
    "accumulate_grad_batches": "grad_accum_steps=",
    "check_val_every_n_epoch": 'eval_frequency="epoch"',
    "epochs": "num_epochs=",
    "eval_strategy": 'eval_frequency="epoch", or a number of steps',
    "evaluation_strategy": 'eval_frequency="epoch", or a number of steps',
    "gradient_accumulation_steps": "grad_accum_steps=",
    "limit_train_batches": "steps_per_epoch=",
    "limit_val_batches": "eval_steps=",
    "max_epochs": "num_epochs=",
    "n_epochs": "num_epochs=",
    "num_train_epochs": "num_epochs=",
    "val_check_interval": "eval_frequency=",
}
_CHECKPOINT: Final = {
    "dirpath": "checkpoint_root=",
    "every_n_epochs": "epochs=",
    "every_n_train_steps": "steps=",
    "filename": 'checkpoint_name="checkpoint_{step}"',
    "monitor": "the callback SaveBest(metric=...)",
    "save_last": "save_final_checkpoint=True",
    "save_steps": "steps=",
    "save_strategy": "epochs=1, or steps=",
    "save_top_k": "the callbacks SaveBest(metric=..., k=...) and KeepNCheckpoints(n=...)",
    "save_total_limit": "the callback KeepNCheckpoints(n=...)",
}
_CLIPPING: Final = {
    "gradient_clip_val": "max_gradient_norm=",
    "max_grad_norm": "max_gradient_norm=",
}
ARGUMENTS: Final = {
    "Checkpoint": _CHECKPOINT,
    "EarlyStopping": _WATCH,
    "Logging": {"log_every_n_steps": "log_steps=", "logging_steps": "log_steps="},
    "MixedPrecision": _CLIPPING,
    "SaveBest": _BEST,
    "TrainingLoop": _LOOP,
}
"""For each class: arguments of its counterparts, and what to use here."""

_CONSOLE: Final = 'Trainer(progress="bar")'
CALLBACKS: Final = {
    "EarlyStoppingCallback": "EarlyStopping(metric=..., patience=...)",
    "LearningRateFinder": "LRFinder",
    "LearningRateMonitor": 'LogOptimizerParamGroup(keys="lr")',
    "ModelCheckpoint": "SaveBest(metric=...) for the best checkpoints, KeepNCheckpoints(n=...) "
    "and Trainer(checkpoint=Checkpoint(steps=...)) for the newest",
    "ModelSummary": "CountParams",
    "PrinterCallback": 'Trainer(progress="lines")',
    "ProgressCallback": _CONSOLE,
    "RichProgressBar": _CONSOLE,
    "StochasticWeightAveraging": "ModelEma",
    "TQDMProgressBar": _CONSOLE,
    "Timer": "Trainer(loop=TrainingLoop(max_time=...))",
    "TrainerCallback": "modelzoo_trainer.Callback",
    "WeightAveraging": "ModelEma",
}
"""Callbacks of other trainers."""

_LOGGERS: Final = "modelzoo_trainer.loggers"
_STOPPING: Final = "modelzoo_trainer.callbacks.EarlyStopping(metric=..., patience=...)"
_SUBCLASS: Final = "a subclass of modelzoo_trainer"
_OBJECTS: Final = CALLBACKS | {
    "CSVLogger": f"{_LOGGERS}.CSVLogger()",
    "Callback": f"{_SUBCLASS}.Callback",
    "EarlyStopping": _STOPPING,
    "EarlyStoppingCallback": _STOPPING,
    "Logger": f"{_SUBCLASS}.Logger",
    "MLFlowLogger": f"{_LOGGERS}.MLflowLogger()",
    "MLflowCallback": f"{_LOGGERS}.MLflowLogger()",
    "ProgressBar": _CONSOLE,
    "SpikeDetection": "modelzoo_trainer.callbacks.SpikeDetection()",
    "TensorBoardCallback": f"{_LOGGERS}.TensorBoardLogger()",
    "TensorBoardLogger": f"{_LOGGERS}.TensorBoardLogger()",
    "ThroughputMonitor": "modelzoo_trainer.callbacks.RateProfiler()",
    "TrainerCallback": f"{_SUBCLASS}.Callback",
    "WandbCallback": f"{_LOGGERS}.WandbLogger()",
    "WandbLogger": f"{_LOGGERS}.WandbLogger()",
}
_LIBRARIES: Final = {
    "lightning": "Lightning",
    "lightning_fabric": "Lightning",
    "pytorch_lightning": "Lightning",
    "transformers": "Hugging Face",
}

_RESULT: Final = "trainer.result.metrics, or the result of fit"
ATTRIBUTES: Final = {
    "accelerator": "trainer.backend",
    "args": "the arguments of Trainer, such as trainer.loop",
    "callback_metrics": _RESULT,
    "checkpoint_callback": "trainer.checkpoint, or trainer.result.best_checkpoint",
    "current_epoch": "trainer.data.epoch",
    "estimated_stepping_batches": "num_epochs * math.ceil(len(train_dataloader) / "
    "grad_accum_steps)",
    "evaluate": "trainer.validate(val_dataloader)",
    "is_global_zero": "trainer.backend.comm.is_main",
    "load_from_checkpoint": "ckpt_path= of trainer.fit, validate, test or predict",
    "log": "trainer.log_metrics(name=value)",
    "logged_metrics": _RESULT,
    "lr_scheduler": "trainer.schedulers",
    "max_epochs": "trainer.loop.num_epochs",
    "save_model": 'the callback ExtraCheckpoint(at_end=True, file_format="safetensors"), or '
    "trainer.model.save_pretrained(folder) for a model of transformers",
    "should_stop": 'raise StopTraining("reason") in a hook',
    "state": "trainer.global_step and trainer.data.epoch",
    "strategy": "trainer.backend",
    "test_dataloader": "trainer.test(dataloader)",
    "test_dataloaders": "trainer.test(dataloader)",
    "train": "trainer.fit(train_dataloader, val_dataloader)",
    "train_dataloader": "the dataloader that you pass to fit",
    "val_dataloaders": "the dataloaders that you pass to fit",
}
"""Methods and attributes of other trainers."""


def advice_for(names: dict[str, str], name: str) -> str:
    """Return "Use ..." for a name of another trainer; "" = not one of them."""
    return f"Use {names[name]}." if name in names else ""


def explain_foreign(kind: type) -> str:
    """Return whose class it is, and what to use instead; "" = not one of another trainer.

    Args:
        kind: The class of a callback or a logger.
    """
    theirs = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in _LIBRARIES]
    if not theirs:
        return ""
    base = theirs[0]
    library = _LIBRARIES[base.__module__.partition(".")[0]]
    verb = "is" if base is kind else "is a subclass of"
    instead = next((_OBJECTS[one.__name__] for one in theirs if one.__name__ in _OBJECTS), "")
    return (
        f"{kind.__name__} {verb} {library}'s {base.__module__}.{base.__qualname__}, which does not "
        f"work here. Use {instead or _OBJECTS['Callback']}."
    )
