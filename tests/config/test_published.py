"""Names and arguments of published classes, against the registry and whole configurations."""

from collections import Counter

import pytest

from modelzoo_trainer import callbacks, loggers
from modelzoo_trainer.config.arguments import Schema, check_arguments, schema_of
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_file, read_text
from modelzoo_trainer.config.positions import Mapping, Place, Problems, Scalar
from modelzoo_trainer.config.published import published_fields, published_names, published_schema
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.registry import PROCESSORS, processor_class
from modelzoo_trainer.zoo.models.registry import MODELS, model_class
from tests.compat.corpus_here import CONFIGURATIONS

SHIPPED = {
    "model": tuple(MODELS),
    "data processor": tuple(PROCESSORS),
    "callback": tuple(callbacks.__all__),
    "logger": tuple(loggers.__all__),
}
NAMES = {
    "model": """
        bert bert/classifier bert/extractive_summarization bert/token_classifier bloom btlm dino
        dit dpo dpr dpr/embedding_generation esm2 esm2/classification falcon fc_mnist gemma2
        generic_image_encoders gpt-neox gpt2 gpt3 gpt_backbone gptj jais llama llava mistral
        mixtral multimodal_simple santacoder starcoder t5 transformer vision_transformer
    """,
    "data processor": """
        BaseImageDataProcessor BertCSVDataProcessor BertCSVDynamicMaskDataProcessor
        BertHDF5DataProcessor BertSumCSVDataProcessor BertTokenClassifierDataProcessor
        DPREmbedGenHDF5DataProcessor DPREmbedGenHDF5MapDataProcessor DPRHDF5DataProcessor
        DiffusionLatentImageNet1KProcessor DinoImageDataProcessor DpoHDF5DataProcessor
        DummyDataProcessor DummyIterableDataProcessor GptHDF5DataProcessor GptHDF5MapDataProcessor
        HuggingFaceDataProcessorEli5 HuggingFaceIterableDataProcessorEli5 ImageNet1KProcessor
        LlavaHDF5MapDataProcessor MNISTDataProcessor MNISTMapDataProcessor MNLIDataProcessor
        MultimodalRawDatasetProcessor MultimodalSimpleHDF5MapDataProcessor SST2DataProcessor
        T5DynamicDataProcessor T5HDF5DataProcessor TransformerDynamicDataProcessor
    """,
    "callback": """
        BigCodeEvalHarness CheckLoss ComputeNorm ComputeNormGNS CountParams DebugArgsPath
        DumpActivations DumpAvailableTensorNames DurationProfiler EleutherEvalHarness
        EmailNotification FlopUtilization GlobalFlags HFCacheDir KeepNCheckpoints
        LoadCheckpointStates LogInputSummaries LogOptimizerParamGroup LogSparsity Lora
        ModelEvalMetrics ModelZooParamsMetadata NaNChecker NormTensorListener OpProfiler Profiler
        RateProfiler RunSchedule SamplesStreamedInfo SaveCheckpointState SavePerformanceData
        ScopedBigCodeEvalHarnessFlags ScopedEleutherEvalHarnessFlags ScopedTrainFlags
        ScopedValidateFlags SelectiveGrad SkipSamples SlackNotification SummaryTensorListener
        WeightCompression
    """,
    "logger": "ProgressLogger TelemetryLogger TensorBoardLogger WandbLogger",
}
"""Of the format, separated by blanks."""

DIT = """\
name: dit
hidden_size: 512
dropout_rate: 0
attention_initializer: {name: normal}
norm_first: null
var_loss: false
"""
H5_DATA = """\
data_processor: T5HDF5DataProcessor
data_dir: [./a, ./b]
batch_size: 64
shuffle: true
prefetch_factor: null
features_list: [input_ids]
"""


def problems_of(kind, place, name):
    """Return the messages about the arguments of a published class."""
    schema = published_schema(kind, name)
    if schema is None and name in MODELS:  # what the format says, besides the class here
        fields = {key: one.parameter for key, one in published_fields(name).items()}
        schema = Schema(name, fields)
    assert schema is not None, f"{place.key_at}: {kind} {name} is not known"
    problems = Problems()
    check_arguments(place, schema, problems, ignored=("name", "data_processor"))
    return problems.lines()


def complaints(kind, text):
    place = Place.root(read_text(text, "p.yaml"))
    name = place.key("name") or place.key("data_processor")
    return problems_of(kind, place, name.node.value)


def walk(place):
    """Yield a place and all inside it."""
    yield place
    for _, inner in place.pairs():
        yield from walk(inner)
    for inner in place.items():
        yield from walk(inner)


def components(path):
    """Yield kind, name and arguments of what a configuration names."""
    for place in walk(Place.root(read_file(path))):
        processor, trainer = place.key("data_processor"), place.key("trainer")
        if processor is not None and isinstance(processor.node, Scalar):
            yield "data processor", processor.node.value, place
        init = trainer.key("init") if trainer is not None else None
        if init is None:
            continue
        model = init.key("model")
        name = model.key("name") or model.key("model_name")
        if name is not None:
            yield "model", name.node.value, model
        for kind, section in (("callback", "callbacks"), ("logger", "loggers")):
            for item in init.key(section).items() if init.key(section) else ():
                for key, arguments in item.pairs():
                    yield kind, key, arguments


def unshipped(path):
    for kind, name, place in components(path):
        if name.lower() not in {shipped.lower() for shipped in SHIPPED[kind]}:
            yield kind, name, place


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_of_the_format_is_shipped_or_published(kind):
    known = {*SHIPPED[kind], *published_names(kind)}
    assert set(NAMES[kind].split()) - known == set()


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "logger"])  # all shipped
def test_every_published_class_has_a_schema_under_its_name_in_any_case(kind):
    names = published_names(kind)
    owners = [published_schema(kind, spelt).owner for spelt in map(str.upper, names)]
    assert names
    assert owners == list(names)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("model", "t6"), ("model", "gpt decoder"), ("callback", "dit"), ("optimizer", "AdamW")],
)
def test_what_is_not_published_has_no_schema(kind, name):
    assert published_schema(kind, name) is None


def test_nothing_is_published_of_another_kind():
    assert published_names("scheduler") == ()


def test_a_class_has_the_fields_of_the_one_it_is_like():
    bert = {name: one.parameter for name, one in published_fields("bert").items()}
    esm2 = {name: one.parameter for name, one in published_fields("esm2").items()}
    assert {name: parameter.annotation for name, parameter in bert.items()} == {
        name: esm2[name].annotation for name in bert
    }
    assert sorted(esm2.keys() - bert.keys()) == ["mask_token_id", "token_dropout"]


def test_its_own_field_comes_before_an_inherited_one():
    general, own = (
        published_schema("data processor", name).parameters["batch_size"]
        for name in ("HuggingFaceIterableDataProcessorEli5", "DummyDataProcessor")
    )
    assert (general.is_required, own.is_required) == (True, False)


@pytest.mark.parametrize(("kind", "text"), [("model", DIT), ("data processor", H5_DATA)])
def test_what_the_class_takes_is_accepted(kind, text):
    assert complaints(kind, text) == []


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong", "message"),
    [
        (
            "model",
            DIT,
            "hidden_size: 512",
            "hiden_size: 512",
            "p.yaml:2:1: hiden_size: no such argument of dit. Did you mean 'hidden_size'?",
        ),
        (
            "model",
            DIT,
            "hidden_size: 512",
            "hidden_size: 512.5",
            "p.yaml:2:14: hidden_size: expected an integer, got 512.5.",
        ),
        (
            "model",
            DIT,
            "{name: normal}",
            "12",
            "p.yaml:4:24: attention_initializer: expected a string or a mapping, got 12.",
        ),
        (
            "model",
            DIT,
            "var_loss: false",
            "var_loss: null",
            "p.yaml:6:11: var_loss: expected true or false, got null.",
        ),
        (
            "data processor",
            H5_DATA,
            "shuffle: true",
            "shufle: true",
            "p.yaml:4:1: shufle: no such argument of T5HDF5DataProcessor. Did you mean 'shuffle'?",
        ),
        (
            "data processor",
            H5_DATA,
            "shuffle: true",
            "shuffle: 'yes'",
            "p.yaml:4:10: shuffle: expected true or false, got 'yes'. yes is text in YAML 1.2; "
            "write true or false.",
        ),
        (
            "data processor",
            H5_DATA,
            "[./a, ./b]",
            "{train: ./a}",
            "p.yaml:2:11: data_dir: expected a string or a list, got a mapping.",
        ),
        (
            "data processor",
            H5_DATA,
            "batch_size: 64\n",
            "",
            "p.yaml:1:1: batch_size: missing; T5HDF5DataProcessor requires it (an integer).",
        ),
    ],
)
def test_a_wrong_key_or_value_is_refused_at_its_line(kind, text, right, wrong, message):
    assert right in text
    assert complaints(kind, text.replace(right, wrong)) == [message]


def test_any_key_passes_in_an_open_class_and_known_ones_are_checked():
    given = read_text("bigcode_args: {tasks: x}\nnum_workers: 0\nflags: none\n", "p.yaml")
    found = problems_of("callback", Place.root(given), "BigCodeEvalHarness")
    assert found == ["p.yaml:3:8: flags: expected a mapping or null, got 'none'."]


def test_a_class_without_arguments_takes_none():
    given = read_text("steps: 3\n", "p.yaml")
    found = problems_of("callback", Place.root(given), "RunSchedule")
    assert found == ["p.yaml:1:1: steps: no such argument of RunSchedule, which has no arguments."]


@pytest.mark.corpus
def test_the_published_configurations_have_no_problems():
    found = {}
    for path in sorted(CONFIGURATIONS.rglob("*.yaml")):
        for kind, name, place in unshipped(path):
            if wrong := problems_of(kind, place, name):
                found[path.name, name] = wrong
    assert found == {}


@pytest.mark.corpus
def test_nearly_all_keys_of_the_published_configurations_belong_to_closed_classes():
    num_closed, num_open = Counter(), Counter()
    for path in sorted(CONFIGURATIONS.rglob("*.yaml")):
        for kind, name, place in components(path):
            schema = published_schema(kind, name)  # None = shipped
            counted = num_open if schema is not None and schema.is_open else num_closed
            counted[kind] += len(place.node.entries) if isinstance(place.node, Mapping) else 0
    print(f"\nkeys in closed classes: {dict(num_closed)}, in open ones: {dict(num_open)}")  # noqa: T201
    assert num_closed.total() > 0.95 * (num_closed.total() + num_open.total())


MODEL_KEYS = {
    "gpt3 gpt2": """
        attention_dropout_rate dropout_rate embedding_initializer initializer filter_size
        output_layer_initializer embeddings_scale hidden_size loss_scaling loss_weight
        max_position_embeddings mup_base_hidden_size mup_base_filter_size output_logits_alpha
        scale_qk_dot_by_d nonlinearity num_heads num_hidden_layers position_embedding_type
        share_embedding_weights use_projection_bias_in_attention use_ffn_bias_in_attention
        use_ffn_bias use_bias_in_output vocab_size attention_type layer_norm_epsilon norm_type
        embd_pdrop ffn_initializer ffn_output_layer_initializer alibi_trainable_slopes
        num_relative_attention_buckets initializer_range compute_eval_metrics lr_adjustment_groups
    """,
    "llama mistral": """
        attention_module extra_attention_params attention_sliding_window_length
        attention_sink_tokens embedding_layer_norm embedding_dropout_rate pos_scaling_type
        pos_scaling_factor pos_scaling_extra_args rope_theta rotary_dim attention_inner_dim
        attention_chunk_size attention_vertical_column_spacing attention_vertical_column_width
        attention_qk_norm_layer attention_qk_norm_eps use_sink_token loop_dim dtype
        use_experimental_flex_api boundary_casting fold_rope_consts attention_kernel start_token
        stop_sequences max_tokens temperature top_k top_p position_embedding_offset
    """,
    "mixtral gpt3": "moe moe_params output_logits_scale embeddings_scale scale_qk_dot_by_d",
    "gemma2 llama": """
        attention_logit_softcapping final_logit_softcapping attention_logits_alpha
        sliding_window_every_other_decoder_layer norm_first_sandwich
        sliding_window_every_other_decoder_layer_pattern
    """,
    "jais btlm bloom starcoder santacoder gpt2": """
        attention_softmax_fp32 boundary_casting scale_qk_dot_by_layer_idx attention_kernel
    """,
    "gptj falcon gpt-neox": """
        residual_dropout_rate use_untied_layer_norm attention_logits_alpha rotary_dim use_ffn_bias
        attention_sink_tokens attention_sliding_window_length attention_initializer initializer
    """,
    "dpo": "dpo compute_eval_metrics policy_model",
    "bert esm2": """
        encoder_nonlinearity pooler_nonlinearity mlm_loss_weight disable_nsp num_segments
        mask_padding_in_positional_embed mlm_nonlinearity label_smoothing use_final_layer_norm
        pad_token_id share_embedding_weights embedding_layer_norm rotary_dim norm_first
    """,
    "esm2": "token_dropout mask_token_id",
    "bert/classifier": "num_labels problem_type task_dropout compute_eval_metrics",
    "bert/token_classifier": """
        num_classes encoder_output_dropout_rate include_padding_in_loss label_vocab_file
    """,
    "bert/extractive_summarization": "loss_weight use_cls_bias vocab_file max_position_embeddings",
    "dpr": """
        q_encoder ctx_encoder encoder use_biencoder pooler_type softmax_temperature
        mutual_information compute_eval_metrics
    """,
    "t5 transformer": """
        src_vocab_size extra_ids d_model d_kv d_ff lm_loss_weight mup_base_d_model mup_base_d_ff
        mup_base_d_kv embeddings_alpha encoder_attention_logits_alpha output_logits_alpha
        decoder_attention_logits_alpha scale_encoder_qk_dot_by_d scale_decoder_qk_dot_by_d
        scale_output_logits_by_d relu_dropout_rate use_ffn_bias use_pre_encoder_decoder_dropout
        use_transformer_initialization use_pre_encoder_decoder_layer_norm mlm_loss_scaling
        use_dropout_outside_residual_path decoder_nonlinearity tie_encoder_decoder use_cache
    """,
    "vision_transformer": """
        image_size patch_size use_conv_patchified_embedding use_dinov2_classifier freeze
        layerscale_value use_post_embed_layer_norm use_encoder_pooler_layer extra_attention_params
        stochastic_depth_drop_prob interpolate_position_embedding use_masked_patches
    """,
    "dit": """
        patch_size label_dropout_rate num_diffusion_steps schedule_name vae reverse_process
        beta_start beta_end use_conv_transpose_unpatchify var_loss encoder_nonlinearity
    """,
    "dino generic_image_encoders": "image_model_trunks heads losses copy_init_weights ema freeze",
    "llava": """
        image_model text_model projector image_feature_select_layer_idx image_feature_select_mode
        image_start_idx freeze loss_scaling loss_weight
    """,
    "multimodal_simple": "image_model_list text_model output_list loss_weight freeze",
}
"""Keys of `model` that published files set, or that the classes document; names of models first."""
WORKERS = "num_workers prefetch_factor persistent_workers batch_size shuffle shuffle_seed data_dir"
DATA_KEYS = {
    "GptHDF5MapDataProcessor BertHDF5DataProcessor LlavaHDF5MapDataProcessor": f"""
        {WORKERS} use_worker_cache mixture data_subset num_samples drop_last pad_last sort_files
        max_sequence_length use_vsl dataset_map_fn
    """,
    "GptHDF5MapDataProcessor": "vocab_size repeat data_transforms",
    "GptHDF5DataProcessor": f"""
        {WORKERS} shuffle_buffer drop_last use_vsl features_list max_sequence_length vocab_size
        repeat use_multiple_workers
    """,
    "BertCSVDynamicMaskDataProcessor": f"""
        {WORKERS} vocab_file max_sequence_length max_predictions_per_seq do_lower masked_lm_prob
        disable_nsp dynamic_mlm_scale buckets mask_whole_word oov_token mask_token
        document_separator_token exclude_from_masking gather_mlm_labels labels_pad_id input_pad_id
        attn_mask_pad_id segment_pad_id drop_last shuffle_buffer
    """,
    "BertCSVDataProcessor": f"""
        {WORKERS} disable_nsp vocab_size vocab_file whole_word_masking max_predictions_per_seq
        do_lower masked_lm_prob max_sequence_length max_position_embeddings buckets
    """,
    "DinoImageDataProcessor": """
        batch_size shuffle shuffle_seed num_workers prefetch_factor dataset ssl_transform
    """,
    "DiffusionLatentImageNet1KProcessor": f"""
        {WORKERS} num_classes split num_diffusion_steps image_channels use_worker_cache latent_size
        label_dropout_rate latent_channels vae_scaling_factor schedule_name
    """,
    "LlavaHDF5MapDataProcessor MultimodalSimpleHDF5MapDataProcessor": f"""
        {WORKERS} img_data_dir image_data_size transforms drop_last
    """,
    "MultimodalSimpleHDF5MapDataProcessor": "max_num_img num_patches",
    "T5DynamicDataProcessor TransformerDynamicDataProcessor": """
        src_vocab_file src_data_dir extra_ids src_max_sequence_length tgt_max_sequence_length
        shuffle_buffer do_lower pack_sequences num_documents_to_concatenate labels_pad_id
        input_pad_id dynamic_loss_weight drop_last buckets oov_token
    """,
    "ImageNet1KProcessor": f"""
        {WORKERS} image_size split transforms use_worker_cache num_classes sampler noaugment
        ra_sampler_num_repeat mixup_alpha cutmix_alpha drop_last
    """,
    "MNLIDataProcessor SST2DataProcessor": f"""
        {WORKERS} is_training vocab_file max_sequence_length do_lower
    """,
    "BertSumCSVDataProcessor": f"{WORKERS} max_sequence_length max_cls_tokens",
    "BertTokenClassifierDataProcessor": f"""
        {WORKERS} vocab_file max_sequence_length label_vocab_file include_padding_in_loss
    """,
    "DpoHDF5DataProcessor DPRHDF5DataProcessor": f"{WORKERS} shuffle_buffer",
    "MNISTDataProcessor": """
        data_dir batch_size drop_last_batch drop_last to_float16 shuffle split num_workers
        use_fake_data fake_data_seed
    """,
}


def known_keys(kind, name):
    """Return the keys that the configuration knows of a class."""
    schema = published_schema(kind, name)
    if schema is not None:
        return schema.parameters.keys()
    if kind == "data processor":
        return schema_of(processor_class(name)).parameters.keys()
    return {*published_fields(name), *schema_of(model_class(name)).parameters}


@pytest.mark.parametrize(
    ("kind", "names", "keys"),
    [("model", *one) for one in MODEL_KEYS.items()]
    + [("data processor", *one) for one in DATA_KEYS.items()],
)
def test_every_key_of_the_format_is_known(kind, names, keys):
    lacks = {name: set(keys.split()) - known_keys(kind, name) for name in names.split()}
    assert [keys for keys in lacks.values() if keys] == []


LLAMA = """\
trainer:
  init:
    device: cpu
    model: {name: llama, hidden_size: 16, num_heads: 2, num_hidden_layers: 1, %s}
  validate:
    val_dataloader: {data_processor: DigitsProcessor, split: val, batch_size: 90}
"""


def llama(more, **options):
    problems = Problems(**options)
    (plan,) = check_config(read_text(LLAMA % more, "p.yaml"), shipped_names(), None, problems)
    return [str(note) for note in plan.notes]


TOKENS = "memory_tokens: {num: 8}, attention_chunk_size: 512"


def test_a_key_that_is_not_supported_is_known_to_a_check_and_refused_by_name_in_a_run():
    memory, chunk = llama(TOKENS, for_a_run=False)
    assert memory.startswith("p.yaml:4:79: trainer.init.model.memory_tokens: ")
    assert "valid, but cannot run here: " in memory
    assert "attention_chunk_size: no effect" in chunk
    with pytest.raises(ConfigError) as caught:
        llama(TOKENS)
    (line,) = str(caught.value).splitlines()
    assert "memory_tokens: " in line
    assert "of llama, but this package does not support it" in line


@pytest.mark.parametrize(
    "off",
    [
        *("fixed_sparse_attention: null", "use_sink_token: false", "memory_tokens: {}"),
        *("cross_attention_layers: []", "num_extra_input_vocab_tokens: 0"),
        "extra_ffn_params: {static_dual_expert: false}",
    ],
)
def test_a_key_that_is_not_supported_runs_where_it_is_switched_off(off):
    assert llama(off) == []


def test_a_key_that_is_not_supported_has_its_type_and_its_suggestion():
    with pytest.raises(ConfigError) as caught:
        llama("num_extra_input_vocab_tokens: many, use_sink_tokn: true")
    first, second = str(caught.value).splitlines()
    assert "num_extra_input_vocab_tokens: expected an integer, got 'many'" in first
    assert "Did you mean 'use_sink_token'?" in second


WITH_INERT = [
    name for name in MODELS if any(one.is_inert for one in published_fields(name).values())
]


OURS = {"attention", "attention_qk_norm"}  # options that the Model Zoo does not have


def test_most_models_have_fields_without_effect():
    assert len(MODELS) - len(WITH_INERT) < 10


@pytest.mark.parametrize("name", WITH_INERT)
def test_what_is_inert_is_a_field_that_is_not_supported(name):
    fields = published_fields(name)
    own = schema_of(model_class(name)).parameters
    inert = {key for key, one in fields.items() if one.is_inert}
    assert inert & own.keys() == set()
    assert own.keys() - OURS <= fields.keys()


def test_an_older_name_of_a_model_is_known():
    text = (LLAMA % "vocab_size: 9").replace("llama", "LlamaModel")
    (plan,) = check_config(read_text(text, "p.yaml"), shipped_names(), None)
    assert plan.init["model"].target is model_class("llama")
    assert [note.message for note in plan.notes] == ["LlamaModel is an older name of llama."]
