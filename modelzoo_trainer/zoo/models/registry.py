"""Shipped models by their names in a configuration; imported only when used."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from torch import nn

from modelzoo_trainer.base.exports import load
from modelzoo_trainer.errors import ConfigError, suggest

_DINO: Final = "modelzoo_trainer.zoo.models.vision.dino.model:Dino"
_GPT2: Final = "modelzoo_trainer.zoo.models.gpt2:Gpt2"
_GPTJ: Final = "modelzoo_trainer.zoo.models.gptj:GptJ"
_HEADS: Final = "modelzoo_trainer.zoo.models.bert.token_heads"
_T5: Final = "modelzoo_trainer.zoo.models.t5.model:T5"

MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bert": "modelzoo_trainer.zoo.models.bert.pretraining:Bert",
        "bert/classifier": "modelzoo_trainer.zoo.models.bert.classifier:BertClassifier",
        "bert/extractive_summarization": f"{_HEADS}:BertSummarizer",
        "bert/token_classifier": f"{_HEADS}:BertTokenClassifier",
        "dino": _DINO,
        "esm2": "modelzoo_trainer.zoo.models.bert.esm2:Esm2",
        "dpo": "modelzoo_trainer.zoo.models.dpo:Dpo",
        "dpr": "modelzoo_trainer.zoo.models.bert.dpr:Dpr",
        "llava": "modelzoo_trainer.zoo.models.multimodal.llava:Llava",
        "multimodal_simple": "modelzoo_trainer.zoo.models.multimodal.simple:MultimodalSimple",
        "fc_mnist": "modelzoo_trainer.zoo.models.fc_mnist:FcMnist",
        "generic_image_encoders": _DINO,
        "hf_causal_lm": "modelzoo_trainer.zoo.models.hugging_face.causal_lm:HfCausalLm",
        "hf_model": "modelzoo_trainer.zoo.models.hugging_face.model:HfModel",
        "gpt2": _GPT2,
        "bloom": _GPT2,
        "btlm": _GPT2,
        "gemma2": _GPT2,
        "gpt3": _GPT2,
        "jais": _GPT2,
        "llama": _GPT2,
        "mistral": _GPT2,
        "mixtral": _GPT2,
        "santacoder": _GPT2,
        "starcoder": _GPT2,
        "gptj": _GPTJ,
        "falcon": _GPTJ,
        "gpt-neox": _GPTJ,
        "t5": _T5,
        "transformer": _T5,
        "dit": "modelzoo_trainer.zoo.models.vision.dit:Dit",
        "vision_transformer": "modelzoo_trainer.zoo.models.vision.classifier:Vit",
    }
)
"""Name to `module:class`. The constructor of the class is the schema of the `model` section."""


def model_class(name: str) -> type[nn.Module]:
    """Return the class of a shipped model; this imports its module.

    Args:
        name: A key of `MODELS`, case-insensitive.

    Raises:
        ConfigError: If no shipped model has this name.
    """
    place = MODELS.get(name.lower())
    if place is None:
        raise ConfigError(
            f"model name {name!r} is not a shipped model. {suggest(name, MODELS)} "
            f"Shipped: {', '.join(sorted(MODELS))}. "
            "For a custom class, give its dotted path: 'mypackage.mymodule.MyModel'."
        )
    found: type[nn.Module] = load(place)
    return found
