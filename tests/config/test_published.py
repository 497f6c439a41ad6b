"""Names and arguments of published classes, against the registry and whole configurations."""

from collections import Counter

import pytest
from corpus_here import CORPUS

from modelzoo_trainer import callbacks, loggers
from modelzoo_trainer.config.arguments import check_arguments
from modelzoo_trainer.config.loader import read_file, read_text
from modelzoo_trainer.config.positions import Mapping, Place, Scalar
from modelzoo_trainer.config.problems import Problems
from modelzoo_trainer.config.published import published_names, published_schema
from modelzoo_trainer.data.registry import PROCESSORS
from modelzoo_trainer.models.registry import MODELS

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

T5 = """\
name: t5
d_model: 512
dropout_rate: 0
layer_norm_epsilon: [1.0e-6, 1.0e-5]
decoder_nonlinearity: null
use_ffn_bias: false
"""
GPT_DATA = """\
data_processor: GptHDF5MapDataProcessor
data_dir: [./a, ./b]
batch_size: 64
shuffle: true
prefetch_factor: null
"""


def problems_of(kind, place, name):
    """Return the messages about the arguments of a published class."""
    schema = published_schema(kind, name)
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
    [("model", "t6"), ("model", "gpt decoder"), ("callback", "t5"), ("optimizer", "AdamW")],
)
def test_what_is_not_published_has_no_schema(kind, name):
    assert published_schema(kind, name) is None


def test_nothing_is_published_of_another_kind():
    assert published_names("scheduler") == ()


def test_a_class_has_the_fields_of_the_one_it_is_like():
    bert, esm2 = (published_schema("model", name).parameters for name in ("bert", "esm2"))
    assert {name: parameter.annotation for name, parameter in bert.items()} == {
        name: esm2[name].annotation for name in bert
    }
    assert sorted(esm2.keys() - bert.keys()) == ["mask_token_id", "token_dropout"]


def test_its_own_field_comes_before_an_inherited_one():
    general, gpt = (
        published_schema("data processor", name).parameters["shuffle"]
        for name in ("DpoHDF5DataProcessor", "GptHDF5DataProcessor")
    )
    assert (general.is_required, gpt.is_required) == (False, True)


@pytest.mark.parametrize(("kind", "text"), [("model", T5), ("data processor", GPT_DATA)])
def test_what_the_class_takes_is_accepted(kind, text):
    assert complaints(kind, text) == []


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong", "message"),
    [
        (
            "model",
            T5,
            "d_model: 512",
            "d_modle: 512",
            "p.yaml:2:1: d_modle: no such argument of t5. Did you mean 'd_model'?",
        ),
        (
            "model",
            T5,
            "d_model: 512",
            "d_model: 512.5",
            "p.yaml:2:10: d_model: 512.5 does not fit; expected an integer.",
        ),
        (
            "model",
            T5,
            "[1.0e-6, 1.0e-5]",
            "tiny",
            "p.yaml:4:21: layer_norm_epsilon: 'tiny' does not fit; expected a number or a list.",
        ),
        (
            "model",
            T5,
            "use_ffn_bias: false",
            "use_ffn_bias: null",
            "p.yaml:6:15: use_ffn_bias: null does not fit; expected true or false.",
        ),
        (
            "data processor",
            GPT_DATA,
            "shuffle: true",
            "shufle: true",
            "p.yaml:4:1: shufle: no such argument of GptHDF5MapDataProcessor. "
            "Did you mean 'shuffle'?",
        ),
        (
            "data processor",
            GPT_DATA,
            "shuffle: true",
            "shuffle: 'yes'",
            "p.yaml:4:10: shuffle: 'yes' does not fit; expected true or false. "
            "yes is text in YAML 1.2.",
        ),
        (
            "data processor",
            GPT_DATA,
            "[./a, ./b]",
            "{train: ./a}",
            "p.yaml:2:11: data_dir: a mapping does not fit; expected text, a list or null.",
        ),
        (
            "data processor",
            GPT_DATA,
            "batch_size: 64\n",
            "",
            "p.yaml:1:1: batch_size: missing; GptHDF5MapDataProcessor needs it (an integer).",
        ),
    ],
)
def test_a_wrong_key_or_value_is_refused_at_its_line(kind, text, right, wrong, message):
    assert right in text
    assert complaints(kind, text.replace(right, wrong)) == [message]


def test_any_key_passes_in_an_open_class_and_known_ones_are_checked():
    given = read_text("eeh_args: {tasks: x}\nnum_workers: 0\nflags: none\n", "p.yaml")
    found = problems_of("callback", Place.root(given), "EleutherEvalHarness")
    assert found == ["p.yaml:3:8: flags: 'none' does not fit; expected a mapping or null."]


def test_a_class_without_arguments_takes_none():
    given = read_text("steps: 3\n", "p.yaml")
    found = problems_of("callback", Place.root(given), "RunSchedule")
    assert found == ["p.yaml:1:1: steps: no such argument of RunSchedule, which takes none."]


@pytest.mark.corpus
def test_the_published_configurations_have_no_problems():
    found = {}
    num_checked = Counter()
    for path in sorted(CORPUS.rglob("*.yaml")):
        for kind, name, place in unshipped(path):
            num_checked[kind] += 1
            if wrong := problems_of(kind, place, name):
                found[path.name, name] = wrong
    assert found == {}
    assert min(num_checked[kind] for kind in ("model", "data processor", "callback")) > 0


@pytest.mark.corpus
def test_nearly_all_keys_of_the_published_configurations_belong_to_closed_classes():
    num_closed, num_open = Counter(), Counter()
    for path in sorted(CORPUS.rglob("*.yaml")):
        for kind, name, place in unshipped(path):
            counted = num_open if published_schema(kind, name).is_open else num_closed
            counted[kind] += len(place.node.entries) if isinstance(place.node, Mapping) else 0
    print(f"\nkeys in closed classes: {dict(num_closed)}, in open ones: {dict(num_open)}")  # noqa: T201
    assert num_closed.total() > 0.95 * (num_closed.total() + num_open.total())
