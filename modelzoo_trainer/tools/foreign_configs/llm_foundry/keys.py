"""The keys of a training file of llm-foundry, with their counterparts."""

from __future__ import annotations

from typing import Final

from modelzoo_trainer.tools.foreign_configs.section import ForeignKey, absent, moved, no_effect

_OF_MOSAIC: Final = "it belongs to another platform."
MDS: Final = (
    "shards of the streaming library (MDS) are not read. Export the samples to JSON lines in the "
    "folder that data_files of the converted file names."
)
_TRAINED_WITH: Final = "it belongs to streaming of MDS shards, which are not read here."

_RUN: Final = {
    "variables": no_effect("its values were inserted where the file refers to them."),
    "max_seq_len": moved("`max_sequence_length` of the dataloaders"),
    "run_name": moved("`init.model_dir`: `./RUN_NAME`"),
    "seed": moved("`init.seed`"),
    "global_seed": no_effect("its value was inserted where the file refers to it."),
    "max_duration": moved(
        "`loop.num_epochs` (`ep`), `loop.max_steps` (`ba`; `sp`, and `tok` where all samples have "
        "the same length, are divided by what a step has), `loop.max_time` (`sec`)"
    ),
    "eval_interval": moved("`loop.eval_frequency`: steps, `epoch`, or a fraction of the run"),
    "eval_first": absent(
        "there is no validation before the first step. Run `modelzoo-trainer validate` with "
        "--set validate.ckpt_path=null first.",
        False,
    ),
    "eval_subset_num_batches": moved("`loop.eval_steps`; -1 means all"),
    "train_subset_num_batches": moved("`loop.steps_per_epoch`; -1 means all"),
    "global_train_batch_size": moved("`global_batch_size` of the training dataloader"),
    "device_train_batch_size": moved(
        "`batch_size` of the training dataloader, if there is no `global_train_batch_size`"
    ),
    "device_train_microbatch_size": moved(
        "`csx.performance.micro_batch_size` of `ScopedTrainFlags`: gradients of micro-batches add "
        "up to the gradient of the batch"
    ),
    "device_eval_batch_size": moved("`batch_size` of the validation dataloaders"),
    "accumulate_train_batch_on_tokens": no_effect(
        "micro-batches are always weighted by the tokens that count."
    ),
    "precision": moved(
        "`precision`: `amp_bf16` is bfloat16, `amp_fp16` float16, `fp32` no half precision"
    ),
    "dist_timeout": moved("`backend.timeout`"),
    "python_log_level": moved("`logging.log_level`"),
    "console_log_interval": moved("`logging.log_steps`"),
    "progress_bar": moved("`init.progress`: `bar`"),
    "log_to_console": moved("`init.progress`: `lines`; `none` if it is false"),
    "log_config": no_effect("the settings of a run are always saved in its folder."),
    "metadata": absent("runs have no metadata. Use `tags` of WandbLogger or MLflowLogger."),
    "flatten_metadata": no_effect("it belongs to metadata."),
    "code_paths": absent("name modules with --import MODULE on the command line."),
    "max_split_size_mb": absent("set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:N when you start."),
    "expandable_segments": absent(
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True when you start.", False
    ),
    "cuda_load_lazy": absent("set CUDA_MODULE_LOADING=LAZY when you start.", False),
    "compile_config": moved("`backend.compile`"),
    "compile_config.mode": moved("`backend.compile.mode`"),
    "compile_config.fullgraph": moved("`backend.compile.fullgraph`"),
    "compile_config.dynamic": moved("`backend.compile.dynamic`"),
    "compile_config.backend": moved("`backend.compile.backend`"),
    "compile_config.options": absent("set options of the compiler in your own program."),
    "compile_config.disable": moved("no `backend.compile`, if true"),
    "profiler": moved("`OpProfiler`"),
    "profiler.schedule": moved("`start_step` and `end_step` of `OpProfiler`, of the first cycle"),
    "profiler.schedule.skip_first": moved("as above"),
    "profiler.schedule.wait": moved("as above"),
    "profiler.schedule.warmup": moved("as above"),
    "profiler.schedule.active": moved("as above"),
    "profiler.schedule.repeat": moved("1; other numbers are listed"),
    "profiler.*": no_effect("OpProfiler writes a trace for Perfetto and has no such option."),
    "autoresume": moved("`checkpoint.autoload_last_checkpoint`"),
    "icl_tasks": absent(
        "these tasks are files of another evaluation. Evaluate with the tasks of lm_eval: "
        "EleutherEvalHarness."
    ),
    "icl_tasks_str": absent("see icl_tasks: evaluate with EleutherEvalHarness."),
    "icl_subset_num_batches": no_effect("it belongs to icl_tasks."),
    "icl_seq_len": no_effect("it belongs to icl_tasks."),
    "eval_gauntlet": absent(
        "there are no averages over groups of tasks. Evaluate with EleutherEvalHarness."
    ),
    "eval_gauntlet_str": absent("see eval_gauntlet: evaluate with EleutherEvalHarness."),
    "spin_dataloaders": no_effect("a resumed run continues at its batch without reading others."),
    "only_hf_checkpoint": absent(
        "to write a Hugging Face folder without training, use `modelzoo-trainer checkpoint "
        "convert CKPT DIR --to hf`.",
        False,
    ),
    "only_composer_checkpoint": absent("there is no such mode.", False),
    "n_gpus": no_effect("torchrun sets the number of processes."),
    "device_train_grad_accum": no_effect("it is computed from the batch sizes."),
}
_SAVING: Final = {
    "save_folder": moved("`checkpoint.checkpoint_root`"),
    "save_interval": moved("`checkpoint.steps`, `epochs`, or `save_final_checkpoint` (`1dur`)"),
    "save_num_checkpoints_to_keep": moved("`KeepNCheckpoints`; -1 means all"),
    "save_filename": no_effect("checkpoints are folders named checkpoint_STEP."),
    "save_latest_filename": no_effect("the newest intact checkpoint is found without a link."),
    "save_overwrite": absent(
        "a folder that has checkpoints is resumed. Use a new save_folder or run_name.", False
    ),
    "save_weights_only": absent(
        "checkpoints have the whole state. For weights beside it use SaveCheckpointState.", False
    ),
    "save_ignore_keys": absent("checkpoints have the whole state."),
    "load_path": absent(
        "checkpoints of Composer are not read. Write its weights as a Hugging Face folder with "
        "llm-foundry, and name that in pretrained_model_name_or_path."
    ),
    "load_weights_only": no_effect("it belongs to load_path."),
    "load_strict_model_weights": no_effect("it belongs to load_path."),
    "load_ignore_keys": no_effect("it belongs to load_path."),
}
_FSDP: Final = {
    "fsdp_config": moved("`backend.parallel`, `backend.sharding`; without it `replicate: -1`"),
    "fsdp_config.sharding_strategy": moved(
        "`FULL_SHARD`: `shard: -1`; `SHARD_GRAD_OP`: with `reshard_after_forward: false`; "
        "`NO_SHARD`: `replicate: -1`; `HYBRID_SHARD`: both"
    ),
    "fsdp_config.data_parallel_shard_degree": moved("`parallel.shard`"),
    "fsdp_config.data_parallel_replicate_degree": moved("`parallel.replicate`"),
    "fsdp_config.mixed_precision": moved("`sharding.param_dtype`, `sharding.reduce_dtype`"),
    "fsdp_config.activation_checkpointing": moved("`backend.activation_checkpointing: full`"),
    "fsdp_config.activation_checkpointing_reentrant": no_effect(
        "recomputation is never reentrant; results are the same."
    ),
    "fsdp_config.activation_cpu_offload": absent(
        "activations stay on the device. Use backend.activation_checkpointing.", False
    ),
    "fsdp_config.cpu_offload": absent("parameters stay on the device.", False),
    "fsdp_config.state_dict_type": no_effect("each process always writes its part."),
    "fsdp_config.limit_all_gathers": no_effect("FSDP2 limits them itself."),
    "fsdp_config.backward_prefetch": no_effect("FSDP2 prefetches itself."),
    "fsdp_config.forward_prefetch": no_effect("FSDP2 prefetches itself."),
    "fsdp_config.sync_module_states": no_effect("processes always start with equal weights."),
    "fsdp_config.use_orig_params": no_effect("FSDP2 always keeps the parameters."),
    "fsdp_config.flatten_parameters": no_effect("FSDP2 does not flatten parameters."),
    "fsdp_config.min_params": no_effect("FSDP2 is applied to the blocks of the model."),
    "fsdp_config.auto_wrap": no_effect("FSDP2 is applied to the blocks of the model."),
    "fsdp_config.keep_low_precision_grads": absent("gradients have sharding.param_dtype.", False),
    "fsdp_config.load_monolith_rank0_only": no_effect("weights are read a tensor at a time."),
    "fsdp_config.load_fsdp_monolith_rank0_only": no_effect("weights are read a tensor at a time."),
    "fsdp_config.sharded_ckpt_prefix_dir": no_effect("checkpoints are named checkpoint_STEP."),
    "fsdp_config.te_checkpoint_wrapper": absent("there is no Transformer Engine here.", False),
    "fsdp_config.te_shard_fp8_weight": absent("there is no Transformer Engine here.", False),
    "fsdp_config.process_group": absent("set the mesh in backend.parallel."),
    "fsdp_config.device_mesh": absent("set the mesh in backend.parallel."),
    "fsdp_config.ignored_modules": absent("all parameters are sharded."),
    "fsdp_config.load_planner": absent("checkpoints are read and written in one way."),
    "fsdp_config.save_planner": absent("checkpoints are read and written in one way."),
    "fsdp_config.verbose": no_effect("nothing is printed here."),
    "tp_config": absent(
        "plans of tensor parallelism have other names. Set backend.parallel.tensor; shipped "
        "decoders have their plan."
    ),
}
_OPTIMIZATION: Final = {
    "optimizer": moved("`init.optimizer`"),
    "optimizer.name": moved("`decoupled_adamw`: `AdamW`; `decoupled_lionw`: `Lion`"),
    "optimizer.lr": moved("`lr`, and the schedule"),
    "optimizer.betas": moved("`betas`"),
    "optimizer.eps": moved("`eps`"),
    "optimizer.amsgrad": moved("`amsgrad`"),
    "optimizer.weight_decay": moved(
        "`weight_decay`, divided by `lr`: Composer multiplies by lr / initial lr, AdamW and Lion "
        "by lr"
    ),
    "optimizer.param_groups": absent("tag parameters with params: see docs/optimizers.md."),
    "optimizer.disable_grad": absent("freeze parameters in your own program."),
    "scheduler": moved("`init.schedulers`"),
    "scheduler.name": moved(
        "`cosine_with_warmup`, `linear_decay_with_warmup`, `constant_with_warmup`: a "
        "`SequentialLR` of `LinearLR` and the rest"
    ),
    "scheduler.t_warmup": moved("`total_iters` of the first schedule, in steps"),
    "scheduler.t_max": moved("`total_iters` of the second, without the warm-up"),
    "scheduler.alpha_i": moved("`initial_learning_rate`, times `lr`"),
    "scheduler.alpha_f": moved("`end_learning_rate`, times `lr`"),
    "scheduler.alpha": moved("`learning_rate` of `ConstantLR`, times `lr`"),
    "scheduler.scale_warmup": no_effect("there is no scale_schedule_ratio in the file."),
    "scheduler.*": absent("set another schedule: see docs/optimizers.md."),
    "algorithms": moved("see below"),
    "algorithms.gradient_clipping": moved("`precision`"),
    "algorithms.gradient_clipping.clipping_type": moved(
        "`norm`: `max_gradient_norm`; `value`: `max_gradient_value`"
    ),
    "algorithms.gradient_clipping.clipping_threshold": moved("its value"),
    "algorithms.alibi": absent("set position_embedding_type: alibi in the model."),
    "algorithms.gated_linear_units": absent("set nonlinearity: geglu in the model."),
    "algorithms.low_precision_layernorm": absent("normalization runs in float32 under autocast."),
    "algorithms.*": absent("there is no such algorithm. Write a callback: docs/callbacks.md."),
}
_LOADER: Final = {
    "loader.name": moved("`text`, `finetuning`: `task` of `HuggingFaceDataProcessor`"),
    "loader.label": no_effect("validation metrics are numbered: validate_0/loss, ..."),
    "loader.drop_last": moved("`drop_last`"),
    "loader.num_workers": moved("`num_workers`"),
    "loader.prefetch_factor": moved("`prefetch_factor`"),
    "loader.persistent_workers": moved("`persistent_workers`"),
    "loader.pin_memory": no_effect("the device decides."),
    "loader.timeout": no_effect("a worker that dies ends the run."),
    "loader.dataset": moved("see below"),
    "dataset.hf_name": moved("`path`"),
    "dataset.hf_kwargs": moved("see below"),
    "dataset.hf_kwargs.data_dir": moved("`data_dir`"),
    "dataset.hf_kwargs.data_files": moved("`data_files`"),
    "dataset.hf_kwargs.name": moved("`name`"),
    "dataset.hf_kwargs.revision": moved("`revision`"),
    "dataset.hf_kwargs.*": absent("no such option. Save the dataset to a folder, and name it."),
    "dataset.split": moved("`split`"),
    "dataset.max_seq_len": moved("`max_sequence_length`"),
    "dataset.shuffle": moved("`shuffle`"),
    "dataset.shuffle_seed": moved("`shuffle_seed`; the order differs"),
    "dataset.packing_ratio": moved("`packing: true`"),
    "dataset.preprocessing_fn": absent(
        "functions are not called while data are loaded. Save the dataset with the columns "
        "prompt and response, or messages, and name that folder in path."
    ),
    "dataset.target_prompts": absent("only answers count.", "none"),
    "dataset.target_responses": absent("all answers of a conversation count.", "all"),
    "dataset.decoder_only_format": absent("there are no encoder-decoder batches.", True),
    "dataset.allow_pad_trimming": no_effect("padding does not count; its width changes nothing."),
    "dataset.max_leftover_bins_to_keep": no_effect("packing keeps all samples."),
    "dataset.eos_token_id": no_effect("the tokenizer has it."),
    "dataset.bos_token_id": no_effect("the tokenizer has it."),
    "dataset.add_special_tokens": no_effect("the tokenizer decides."),
    "dataset.pad_to_longest": no_effect("padding does not count; its width changes nothing."),
    "dataset.tokenizer_name": no_effect("the section tokenizer has it."),
    "dataset.safe_load": no_effect("datasets are loaded without running their code."),
    "dataset.local": absent(MDS),
    "dataset.remote": absent(MDS),
    "dataset.streams": absent(MDS),
    "dataset.cache_limit": no_effect(_TRAINED_WITH),
    "dataset.download_retry": no_effect(_TRAINED_WITH),
    "dataset.download_timeout": no_effect(_TRAINED_WITH),
    "dataset.epoch_size": absent("set loop.steps_per_epoch."),
    "dataset.keep_zip": no_effect(_TRAINED_WITH),
    "dataset.num_canonical_nodes": no_effect(_TRAINED_WITH),
    "dataset.partition_algo": no_effect(_TRAINED_WITH),
    "dataset.predownload": no_effect(_TRAINED_WITH),
    "dataset.sampling_method": no_effect(_TRAINED_WITH),
    "dataset.sampling_granularity": no_effect(_TRAINED_WITH),
    "dataset.shuffle_algo": no_effect(_TRAINED_WITH),
    "dataset.shuffle_block_size": no_effect(_TRAINED_WITH),
    "dataset.batching_method": no_effect(_TRAINED_WITH),
    "dataset.validate_hash": no_effect(_TRAINED_WITH),
    "dataset.token_encoding_type": no_effect(_TRAINED_WITH),
    "train_loader": moved("`fit.train_dataloader`"),
    "eval_loader": moved("`fit.val_dataloader`, and `validate`; may be a list"),
    "eval_loaders": moved("as `eval_loader`"),
    "tokenizer": moved("see below"),
    "tokenizer.name": moved("`tokenizer` of the dataloaders"),
    "tokenizer.kwargs": moved("see below"),
    "tokenizer.kwargs.model_max_length": no_effect("max_seq_len is the length of rows."),
    "tokenizer.kwargs.*": absent(
        "tokenizers are used as they were saved. Save one with this option, and name its folder."
    ),
}
_LOGGING: Final = {
    "loggers": moved("`init.loggers`"),
    "loggers.wandb": moved("`WandbLogger`"),
    "loggers.wandb.project": moved("`project`"),
    "loggers.wandb.group": moved("`group`"),
    "loggers.wandb.name": moved("`run_name`"),
    "loggers.wandb.entity": moved("`entity`"),
    "loggers.wandb.tags": moved("`tags`"),
    "loggers.wandb.*": absent("WandbLogger has no such option."),
    "loggers.mlflow": moved("`MLflowLogger`"),
    "loggers.mlflow.experiment_name": moved("`experiment_name`"),
    "loggers.mlflow.run_name": moved("`run_name`"),
    "loggers.mlflow.tracking_uri": moved("`tracking_uri`"),
    "loggers.mlflow.tags": moved("`tags`"),
    "loggers.mlflow.*": absent("MLflowLogger has no such option."),
    "loggers.tensorboard": moved("`TensorBoardLogger`"),
    "loggers.tensorboard.log_dir": moved("`summary_dir`"),
    "loggers.tensorboard.*": absent("TensorBoardLogger has no such option."),
    "loggers.inmemory": moved("`RunHistory`"),
    "loggers.in_memory_logger": moved("`RunHistory`"),
    "loggers.mosaicml": no_effect(_OF_MOSAIC),
    "loggers.*": absent("there is no such logger: see docs/loggers.md."),
    "callbacks": moved("`init.callbacks`"),
    "callbacks.lr_monitor": moved("`LogOptimizerParamGroup: {keys: lr}`"),
    "callbacks.speed_monitor": moved("`RateProfiler`, `FlopUtilization`"),
    "callbacks.speed_monitor.window_size": no_effect("rates are those since the last log step."),
    "callbacks.speed_monitor.gpu_flops_available": moved("`peak_flops` of `FlopUtilization`"),
    "callbacks.speed_monitor.time_unit": no_effect("times are seconds."),
    "callbacks.runtime_estimator": moved("`DurationProfiler`"),
    "callbacks.runtime_estimator.skip_batches": no_effect("the first step is left out."),
    "callbacks.runtime_estimator.time_unit": no_effect("times are seconds."),
    "callbacks.optimizer_monitor": moved("`ComputeNorm`"),
    "callbacks.optimizer_monitor.interval": no_effect("norms are logged on log steps."),
    "callbacks.optimizer_monitor.log_optimizer_metrics": absent(
        "only norms of parameters and gradients are logged."
    ),
    "callbacks.memory_monitor": absent(
        "memory is not logged in a run. Estimate it before with `modelzoo-trainer plan`."
    ),
    "callbacks.memory_snapshot": absent("use torch.cuda.memory in your own callback."),
    "callbacks.oom_observer": absent("use torch.cuda.memory in your own callback."),
    "callbacks.system_metrics_monitor": absent("use the system metrics of Weights & Biases."),
    "callbacks.early_stopper": moved("`EarlyStopping`"),
    "callbacks.early_stopper.monitor": moved("`metric`: LanguageCrossEntropy is `validate_N/loss`"),
    "callbacks.early_stopper.dataloader_label": moved("N of `validate_N`, its place in the list"),
    "callbacks.early_stopper.patience": moved("`patience`, in validations"),
    "callbacks.early_stopper.min_delta": moved("`min_delta`"),
    "callbacks.early_stopper.comp": moved("`mode`: `max` if it is greater, else `min`"),
    "callbacks.generate_callback": moved("`GenerateText`, one for each prompt, at the end"),
    "callbacks.generate_callback.prompts": moved("`prompt`"),
    "callbacks.generate_callback.interval": absent("text is generated at the end of a fit."),
    "callbacks.generate_callback.batch_size": no_effect("prompts are taken one at a time."),
    "callbacks.generate_callback.max_new_tokens": moved("`max_new_tokens`"),
    "callbacks.generate_callback.temperature": moved("`temperature`"),
    "callbacks.generate_callback.top_k": moved("`top_k`"),
    "callbacks.generate_callback.do_sample": moved("`temperature: 0`, if false"),
    "callbacks.generate_callback.use_cache": no_effect("keys and values are always cached."),
    "callbacks.generate_callback.*": absent("GenerateText has no such option."),
    "callbacks.hf_checkpointer": moved("`HuggingFaceCheckpoint`, also at the end of a fit"),
    "callbacks.hf_checkpointer.save_folder": moved("`folder`, in `init.model_dir`"),
    "callbacks.hf_checkpointer.save_interval": moved("`steps`; `1dur`: at the end only"),
    "callbacks.hf_checkpointer.huggingface_folder_name": moved("`folder`, with `{step}`"),
    "callbacks.hf_checkpointer.precision": moved("`dtype`; without it `float32`"),
    "callbacks.hf_checkpointer.overwrite": no_effect(
        "folders have the step in their names; one that exists is kept, and the new one numbered."
    ),
    "callbacks.hf_checkpointer.flatten_imports": no_effect("folders contain no code."),
    "callbacks.hf_checkpointer.*": absent("models are not registered in MLflow.", False),
    "callbacks.nan_monitor": moved("`CheckLoss`, which every file has"),
    "callbacks.kill_loss_spike": absent(
        "other rules decide what a spike is. Add SpikeDetection, or CheckLoss with a policy."
    ),
    "callbacks.scheduled_gc": no_effect("the run does not depend on garbage collection."),
    "callbacks.run_timeout": absent("set autorestart.hang_timeout."),
    "callbacks.env_logging": no_effect("versions are in the header of the saved settings."),
    "callbacks.global_lr_scaling": absent("change lr in the file: a resumed run uses it."),
    "callbacks.layer_freezing": absent("freeze parameters in your own program."),
    "callbacks.mono_checkpoint_saver": absent("use `modelzoo-trainer checkpoint export`."),
    "callbacks.async_eval": absent("validate checkpoints with `modelzoo-trainer validate_all`."),
    "callbacks.load_checkpoint": absent("checkpoints of Composer are not read."),
    "callbacks.*": absent("there is no such callback. Write your own: docs/callbacks.md."),
}
COMMON: Final[dict[str, ForeignKey]] = {
    "model": moved("`init.model`"),
    **_RUN,
    **_SAVING,
    **_FSDP,
    **_OPTIMIZATION,
    **_LOADER,
    **_LOGGING,
}
"""The keys of a file besides those in `model`."""
