"""The keys of a training file of torchtune, with their counterparts."""

from __future__ import annotations

from typing import Final

from modelzoo_trainer.tools.foreign_configs.section import ForeignKey, absent, moved, no_effect

_KERNEL: Final = "a kernel; results are the same."
_FOLDER: Final = "the tokenizer comes from the checkpoint's folder."
_OTHER_RECIPE: Final = "only full, LoRA and DPO recipes are converted."

_RUN: Final = {
    "output_dir": moved("`init.model_dir`"),
    "seed": moved("`init.seed`, `shuffle_seed`"),
    "shuffle": moved("`shuffle` of the training dataloader"),
    "batch_size": moved("`batch_size` of the training dataloader, per process"),
    "batch_size_val": moved("`batch_size` of the validation dataloader"),
    "epochs": moved("`loop.num_epochs`"),
    "max_steps_per_epoch": moved("`loop.steps_per_epoch`"),
    "gradient_accumulation_steps": moved("`loop.grad_accum_steps`; weighted by tokens here too"),
    "run_val_every_n_steps": moved("`loop.eval_frequency`"),
    "max_val_batches": moved("`loop.eval_steps`"),
    "clip_grad_norm": moved("`precision.max_gradient_norm`"),
    "optimizer_in_bwd": absent(
        "the optimizer steps after the backward pass, with the same results and more memory.",
        False,
    ),
    "loss": moved("see below"),
    "loss._component_": moved(
        "cross entropy, the mean of all tokens that count; `DPOLoss`: the model `dpo`"
    ),
    "loss.beta": moved("`dpo.beta`"),
    "loss.label_smoothing": absent("pairs have no label smoothing.", 0, 0.0),
    "loss.ignore_index": no_effect("tokens that do not count have a mask."),
    "loss.num_output_chunks": no_effect(_KERNEL),
    "loss.reduction": absent("losses are means.", "mean"),
    "loss.*": absent("the loss has no such option."),
    "compile": moved("`backend.compile`"),
    "compile.model": moved("`backend.compile`"),
    "compile.loss": no_effect("the loss is compiled with the model."),
    "compile.optimizer_step": no_effect("the optimizer is not compiled; results are the same."),
    "compile.scale_grads": no_effect("gradients are scaled without it."),
    "device": moved("`init.device`"),
    "dtype": moved("`dtype` of the model, which keeps its weights in it; full precision otherwise"),
    "cudnn_deterministic_mode": moved("`backend.deterministic`"),
    "enable_activation_checkpointing": moved("`backend.activation_checkpointing: full`"),
    "enable_activation_offloading": absent(
        "activations stay on the device. Use backend.activation_checkpointing.", False
    ),
    "activation_offloading_use_streams": no_effect("it belongs to activation offloading."),
    "ac_mode": moved("`backend.activation_checkpointing`: `full`, `selective`"),
    "ac_option": absent("selective checkpointing keeps matrix products and attention."),
    "fsdp_cpu_offload": absent("parameters stay on the device.", False),
    "fsdp_reshard_after_forward": moved("`backend.sharding.reshard_after_forward`"),
    "fsdp_sharding_strategy": moved(
        "`FULL_SHARD`: `shard: -1`; `SHARD_GRAD_OP`: with `reshard_after_forward: false`; "
        "`NO_SHARD`: `replicate: -1`"
    ),
    "custom_sharded_layers": no_effect(
        "all parameters are sharded: each block alone, the others together."
    ),
    "memory_efficient_fsdp_wrap": no_effect("each block is sharded alone."),
    "data_parallel_shard_dim": moved("`backend.parallel.shard`"),
    "data_parallel_replicate_dim": moved("`backend.parallel.replicate`"),
    "tensor_parallel_dim": absent(
        "hf_causal_lm has no tensor plan. Use a decoder of this package with parallel.tensor.", 1
    ),
    "tensor_parallel_plan": no_effect("it belongs to tensor_parallel_dim."),
    "parallelize_plan": no_effect("it belongs to tensor_parallel_dim."),
    "context_parallel_dim": absent(
        "hf_causal_lm cannot split rows. Use a decoder of this package with parallel.context.", 1
    ),
    "context_parallel_rotate_method": no_effect("it belongs to context_parallel_dim."),
    "expert_parallel_dim": absent("experts are not split among processes.", 1),
    "enable_fp8_training": absent("there are no 8-bit products here.", False),
    "fp8_recipe_name": no_effect("it belongs to enable_fp8_training."),
    "use_loss_parallel_ctx_manager": no_effect("it belongs to tensor parallelism."),
    "fused": no_effect(_KERNEL),
    "resume_from_checkpoint": moved("`checkpoint.autoload_last_checkpoint`"),
    "save_adapter_weights_only": moved("`HuggingFaceCheckpoint.merge_adapters: false`"),
    "enable_async_checkpointing": moved("`checkpoint.asynchronous`"),
    "save_every_n_steps": moved("`checkpoint.steps`; without it `epochs: 1`"),
    "save_last_epoch_only": moved("`checkpoint.save_final_checkpoint`"),
    "keep_last_n_checkpoints": moved("`KeepNCheckpoints`"),
    "log_every_n_steps": moved("`logging.log_steps`"),
    "log_level": moved("`logging.log_level`"),
    "log_peak_memory_stats": absent(
        "memory is not logged in a run. Estimate it before with `modelzoo-trainer plan`.", False
    ),
    "package": no_effect("it is a label."),
    "recipe": no_effect("it is a label."),
    "model_type": no_effect("config.json in the checkpoint's folder says it."),
    "quantizer": absent(f"weights are not quantized; {_OTHER_RECIPE}"),
    "fake_quant_after_n_steps": absent(f"weights are not quantized; {_OTHER_RECIPE}"),
    "memory_efficient_fake_quant": absent(f"weights are not quantized; {_OTHER_RECIPE}"),
    "teacher_model": absent(f"there is no distillation; {_OTHER_RECIPE}"),
    "teacher_checkpointer": absent(f"there is no distillation; {_OTHER_RECIPE}"),
    "kd_ratio": absent(f"there is no distillation; {_OTHER_RECIPE}"),
    "kd_loss": absent(f"there is no distillation; {_OTHER_RECIPE}"),
}
_MODEL: Final = {
    "model": moved("`init.model`: `hf_causal_lm` of the checkpoint's folder"),
    "model._component_": moved("LoRA and DoRA by its name; the folder has the architecture"),
    "model.lora_attn_modules": moved("`peft_config.target_modules`: `output_proj` is `o_proj`"),
    "model.apply_lora_to_mlp": moved("`target_modules`: `gate_proj`, `up_proj`, `down_proj`"),
    "model.apply_lora_to_output": moved("`target_modules`: `lm_head`"),
    "model.lora_rank": moved("`peft_config.r`"),
    "model.lora_alpha": moved("`peft_config.lora_alpha`"),
    "model.lora_dropout": moved("`peft_config.lora_dropout`"),
    "model.use_dora": moved("`peft_config.use_dora`"),
    "model.quantize_base": absent("frozen weights are not quantized.", False),
    "model.*": absent(
        "config.json in the checkpoint's folder has the architecture. To change it, set "
        "config_overrides with the name there."
    ),
    "checkpointer": moved("see below"),
    "checkpointer._component_": moved(
        "`FullModelHFCheckpointer`; the others read no Hugging Face folder"
    ),
    "checkpointer.checkpoint_dir": moved("`pretrained_model_name_or_path`, `tokenizer`"),
    "checkpointer.checkpoint_files": no_effect("the weights of the folder are found."),
    "checkpointer.output_dir": moved(
        "`HuggingFaceCheckpoint`: `folder`, in `init.model_dir`; `steps`, of an epoch"
    ),
    "checkpointer.model_type": no_effect("config.json in the folder says it."),
    "checkpointer.safe_serialization": no_effect("weights are always written as safetensors."),
    "checkpointer.recipe_checkpoint": absent("checkpoints of torchtune are not resumed."),
    "checkpointer.adapter_checkpoint": absent("checkpoints of torchtune are not resumed."),
    "checkpointer.should_load_recipe_state": absent(
        "checkpoints of torchtune are not resumed.", False
    ),
    "checkpointer.enable_dcp": no_effect("each process always writes its part."),
    "checkpointer.keep_last_n_checkpoints": moved("`KeepNCheckpoints`"),
    "ref_checkpointer": moved("the reference of `dpo`: the initial weights"),
    "ref_checkpointer.checkpoint_dir": moved("must equal `checkpointer`'s"),
    "ref_checkpointer.*": no_effect("the reference is the initial weights."),
}
_DATA: Final = {
    "tokenizer": moved("see below"),
    "tokenizer._component_": no_effect(_FOLDER),
    "tokenizer.path": no_effect(_FOLDER),
    "tokenizer.merges_file": no_effect(_FOLDER),
    "tokenizer.special_tokens_path": no_effect(_FOLDER),
    "tokenizer.tokenizer_json_path": no_effect(_FOLDER),
    "tokenizer.tokenizer_config_json_path": no_effect(_FOLDER),
    "tokenizer.generation_config_path": no_effect(_FOLDER),
    "tokenizer.max_seq_len": moved("`max_sequence_length`"),
    "tokenizer.prompt_template": absent("chats have the template of the folder's tokenizer."),
    "tokenizer.truncation_type": absent("set truncation of the dataloader."),
    "tokenizer.*": absent("the tokenizer is used as it was saved."),
    "dataset": moved("`fit.train_dataloader`: `HuggingFaceDataProcessor`"),
    "dataset_val": moved("`fit.val_dataloader`"),
    "data._component_": moved("`task`, `path` and columns"),
    "data.source": moved("`path`"),
    "data.split": moved("`split`"),
    "data.data_files": moved("`data_files`"),
    "data.data_dir": moved("`data_dir`"),
    "data.name": moved("`name`"),
    "data.subset": moved("`name`"),
    "data.revision": moved("`revision`"),
    "data.packed": moved("`packing`"),
    "data.column": moved("`text_column`"),
    "data.column_map": moved("`prompt_column`, `response_column`, `chosen_column`, ..."),
    "data.conversation_column": moved("`messages_column`"),
    "data.conversation_style": moved("`message_role_key`, `message_content_key`"),
    "data.train_on_input": absent(
        "only answers count. To train on all tokens, use task: text.", False
    ),
    "data.masking_strategy": absent("all answers count.", "train_on_assistant"),
    "data.new_system_prompt": absent("put the system prompt into the dataset."),
    "data.prompt_template": absent("put the text of the template into the dataset."),
    "data.template": absent("put the text of the template into the dataset."),
    "data.chat_format": absent("chats have the template of the folder's tokenizer."),
    "data.max_seq_len": moved("`max_sequence_length`"),
    "data.add_eos": absent("every document ends with its token.", True),
    "data.split_across_pack": absent("documents continue in the next row.", True),
    "data.filter_fn": absent("filter the dataset, and save it."),
    "data.shuffle": moved("as `shuffle`"),
    "data.weight": absent("several datasets are not mixed. Save them as one."),
    "data.*": absent("no such option. Save the dataset to a folder, and name it."),
    "collate_fn": no_effect("batches are made by the data processor."),
    "num_workers": moved("`num_workers`"),
    "dataloader": absent("set options of the dataloader, such as num_workers."),
}
_OPTIMIZATION: Final = {
    "optimizer": moved("`init.optimizer`"),
    "optimizer._component_": moved("`torch.optim.AdamW`: `AdamW`; others by their path"),
    "optimizer.lr": moved("`lr`, and the schedule"),
    "optimizer.betas": moved("`betas`"),
    "optimizer.eps": moved("`eps`"),
    "optimizer.weight_decay": moved("`weight_decay`"),
    "optimizer.amsgrad": moved("`amsgrad`"),
    "optimizer.fused": no_effect(_KERNEL),
    "optimizer.foreach": no_effect(_KERNEL),
    "optimizer.*": moved("the same argument of the same class"),
    "lr_scheduler": moved("`init.schedulers`"),
    "lr_scheduler._component_": moved("`get_cosine_schedule_with_warmup`"),
    "lr_scheduler.num_warmup_steps": moved("`total_iters` of `LinearLR`"),
    "lr_scheduler.num_cycles": moved("0.5: `CosineDecayLR`; 0: `ConstantLR`"),
    "lr_scheduler.*": absent("set another schedule: see docs/optimizers.md."),
}
_LOGGING: Final = {
    "metric_logger": moved("`init.loggers`"),
    "metric_logger._component_": moved(
        "`WandBLogger`, `TensorBoardLogger`, `MLFlowLogger`; `DiskLogger` and `StdoutLogger` are "
        "what every run has"
    ),
    "metric_logger.log_dir": moved("`summary_dir` of TensorBoard; else the folder of the run"),
    "metric_logger.filename": no_effect("metrics are in metrics.jsonl."),
    "metric_logger.project": moved("`project`"),
    "metric_logger.entity": moved("`entity`"),
    "metric_logger.group": moved("`group`"),
    "metric_logger.name": moved("`run_name`"),
    "metric_logger.tags": moved("`tags`"),
    "metric_logger.experiment_name": moved("`experiment_name`"),
    "metric_logger.tracking_uri": moved("`tracking_uri`"),
    "metric_logger.run_id": moved("`run_id`"),
    "metric_logger.run_name": moved("`run_name`"),
    "metric_logger.organize_logs": no_effect("names of metrics have their groups."),
    "metric_logger.*": absent("the logger has no such option."),
    "profiler": moved("`OpProfiler`, if it is enabled"),
    "profiler._component_": moved("`OpProfiler`"),
    "profiler.enabled": moved("whether there is an `OpProfiler`"),
    "profiler.wait_steps": moved("`start_step` and `end_step`, of the first cycle"),
    "profiler.warmup_steps": moved("as above"),
    "profiler.active_steps": moved("as above"),
    "profiler.num_cycles": moved("1; other numbers are listed"),
    "profiler.*": no_effect("OpProfiler writes a trace for Perfetto and has no such option."),
}
KEYS: Final[dict[str, ForeignKey]] = {**_RUN, **_MODEL, **_DATA, **_OPTIMIZATION, **_LOGGING}
"""All keys; keys of `dataset` and `dataset_val` begin with `data.`."""
