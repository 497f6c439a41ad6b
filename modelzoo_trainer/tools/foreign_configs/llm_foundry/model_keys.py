"""The keys of the section `model` of llm-foundry, with their counterparts."""

from __future__ import annotations

from typing import Final

from modelzoo_trainer.tools.foreign_configs.section import ForeignKey, absent, moved, no_effect

_TE: Final = "there is no Transformer Engine here."

_QK_NORM: Final = (
    "queries and keys have no such normalization; attention_qk_norm of the model normalizes each "
    "head of them."
)

_HF: Final = {
    "hf.name": moved("`name: hf_causal_lm`"),
    "hf.pretrained_model_name_or_path": moved("`pretrained_model_name_or_path`"),
    "hf.pretrained": moved("`pretrained`"),
    "hf.config_overrides": moved("`config_overrides`"),
    "hf.init_device": moved("`init_device`; `mixed` is `cpu`"),
    "hf.peft_config": moved("`peft_config`, with the same keys"),
    "hf.trust_remote_code": moved("`trust_remote_code`; llm-foundry's default is true, here false"),
    "hf.use_flash_attention_2": moved("`attn_implementation: flash_attention_2`"),
    "hf.attn_implementation": moved("`attn_implementation`"),
    "hf.use_auth_token": no_effect("the Hub's library uses the token of your login."),
    "hf.use_train_metrics": no_effect("the loss is logged; its perplexity is exp(loss)."),
    "hf.use_logits": no_effect("the loss needs them."),
    "hf.additional_train_metrics": absent("add a callback: docs/callbacks.md."),
    "hf.additional_eval_metrics": absent("add a callback: docs/callbacks.md."),
    "hf.attention_patch_type": no_effect("a kernel; results are the same."),
    "hf.load_in_8bit": absent("weights are not quantized.", False),
    "hf.should_save_peft_only": absent("checkpoints have all weights.", False),
    "hf.z_loss": absent("there is no z-loss.", 0, 0.0),
    "hf.master_weights_dtype": moved("`dtype`"),
}
_MPT: Final = {
    "mpt.name": moved("`name: gpt2`, the decoder of this package"),
    "mpt.d_model": moved("`hidden_size`"),
    "mpt.n_heads": moved("`num_heads`"),
    "mpt.n_layers": moved("`num_hidden_layers`"),
    "mpt.expansion_ratio": moved("`filter_size`, times `d_model`"),
    "mpt.max_seq_len": moved("`max_position_embeddings`"),
    "mpt.vocab_size": moved("`vocab_size`"),
    "mpt.resid_pdrop": moved("`dropout_rate`"),
    "mpt.emb_pdrop": moved("`embedding_dropout_rate`"),
    "mpt.learned_pos_emb": moved("`position_embedding_type`: `learned`, or null"),
    "mpt.no_bias": moved("`use_..._bias...: false`, `norm_type: biasless-layernorm`"),
    "mpt.norm_type": moved("`norm_type`"),
    "mpt.norm_eps": moved("`layer_norm_epsilon`"),
    "mpt.tie_word_embeddings": moved("`share_embedding_weights`"),
    "mpt.logit_scale": moved("`output_logits_scale`; `inv_sqrt_d_model` is 1 / sqrt(d_model)"),
    "mpt.final_logit_softcapping": moved("`final_logit_softcapping`"),
    "mpt.embedding_fraction": absent("gradients of embeddings are not scaled.", 1, 1.0),
    "mpt.init_device": moved("`backend.sharding.meta_init: true`, if `meta` or `mixed`"),
    "mpt.fc_type": absent(_TE, "torch", {"name": "torch"}),
    "mpt.loss_fn": no_effect("a kernel; results are the same."),
    "mpt.use_cache": no_effect("training needs no cache."),
    "mpt.use_pad_tok_in_ffn": no_effect("padding does not count."),
    "mpt.verbose": no_effect("nothing is printed here."),
    "mpt.block_overrides": absent("all blocks are alike."),
    "mpt.init_config": moved("see below"),
    "mpt.init_config.name": moved("`baseline_`: `initializer`; others are not here"),
    "mpt.init_config.init_std": moved("`initializer_range` of `baseline_`"),
    "mpt.init_config.*": absent("set initializers of the model: docs/reference/models.md."),
    "mpt.attn_config": moved("see below"),
    "mpt.attn_config.attn_type": moved(
        "`multihead_attention`, `multiquery_attention`, `grouped_query_attention`: "
        "`attention_module`"
    ),
    "mpt.attn_config.kv_n_heads": moved("`extra_attention_params.num_kv_groups`"),
    "mpt.attn_config.attn_pdrop": moved("`attention_dropout_rate`"),
    "mpt.attn_config.attn_impl": no_effect("a kernel; results are the same."),
    "mpt.attn_config.attn_uses_sequence_id": no_effect(
        "packed documents never see each other here."
    ),
    "mpt.attn_config.alibi": moved("`position_embedding_type: alibi`"),
    "mpt.attn_config.alibi_bias_max": absent("the maximum is 8.", 8),
    "mpt.attn_config.rope": moved("`position_embedding_type: rotary`"),
    "mpt.attn_config.rope_theta": moved("`rope_theta`"),
    "mpt.attn_config.rope_impl": moved("`dail` has no scaling, `hf` scales as in `rope_hf_config`"),
    "mpt.attn_config.rope_dail_config": moved("see below"),
    "mpt.attn_config.rope_dail_config.type": absent("there is no xPos.", "original"),
    "mpt.attn_config.rope_dail_config.pos_idx_in_fp32": no_effect("positions are in float32."),
    "mpt.attn_config.rope_dail_config.xpos_scale_base": no_effect("it belongs to xPos."),
    "mpt.attn_config.rope_hf_config": moved("see below"),
    "mpt.attn_config.rope_hf_config.type": moved("`pos_scaling_type`: `linear`, `llama3`"),
    "mpt.attn_config.rope_hf_config.factor": moved("`pos_scaling_factor`"),
    "mpt.attn_config.rope_hf_config.low_freq_factor": moved("`pos_scaling_extra_args`"),
    "mpt.attn_config.rope_hf_config.high_freq_factor": moved("`pos_scaling_extra_args`"),
    "mpt.attn_config.rope_hf_config.original_max_position_embeddings": moved(
        "`pos_scaling_extra_args`"
    ),
    "mpt.attn_config.sliding_window_size": moved(
        "`attention_sliding_window_length`, one more: with the token itself"
    ),
    "mpt.attn_config.attn_logit_softcapping": moved("`attention_logit_softcapping`"),
    "mpt.attn_config.softmax_scale": absent("products are divided by the root of the head size."),
    "mpt.attn_config.qk_ln": absent(_QK_NORM, False),
    "mpt.attn_config.qk_gn": absent(_QK_NORM, False),
    "mpt.attn_config.clip_qkv": absent("queries, keys and values are not clipped."),
    "mpt.attn_config.prefix_lm": absent("attention is causal.", False),
    "mpt.attn_config.fused_qkv": no_effect("results are the same."),
    "mpt.attn_config.kv_dim": absent("keys and values come from the same states."),
    "mpt.ffn_config": moved("see below"),
    "mpt.ffn_config.ffn_type": moved("`mptmlp`; `mptglu`: a gated `nonlinearity`"),
    "mpt.ffn_config.ffn_hidden_size": moved("`filter_size`"),
    "mpt.ffn_config.ffn_act_fn": moved("see below"),
    "mpt.ffn_config.ffn_act_fn.name": moved("`nonlinearity`"),
    "mpt.ffn_config.ffn_act_fn.approximate": moved("`tanh`: `gelu_new`"),
    "mpt.ffn_config.fc_type": absent(_TE, "torch", {"name": "torch"}),
    "mpt.ffn_config.*": absent("experts are set in moe: docs/models.md."),
}
MODEL: Final[dict[str, ForeignKey]] = {**_HF, **_MPT}
"""The keys of `model` by kind: `hf.` for hf_causal_lm, `mpt.` for mpt_causal_lm."""
