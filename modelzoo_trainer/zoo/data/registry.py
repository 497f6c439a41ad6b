"""Shipped data processors by class name; imported only when used."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from modelzoo_trainer.base.exports import load
from modelzoo_trainer.errors import ConfigError, suggest

_SEQ2SEQ: Final = "modelzoo_trainer.zoo.data.seq2seq.processors"

PROCESSORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BertCSVDataProcessor": "modelzoo_trainer.zoo.data.csv.bert:BertCSVDataProcessor",
        "BertCSVDynamicMaskDataProcessor": (
            "modelzoo_trainer.zoo.data.csv.bert:BertCSVDynamicMaskDataProcessor"
        ),
        "BertHDF5DataProcessor": "modelzoo_trainer.zoo.data.hdf5.bert:BertHDF5DataProcessor",
        "BertSumCSVDataProcessor": (
            "modelzoo_trainer.zoo.data.csv.summarization:BertSumCSVDataProcessor"
        ),
        "BertTokenClassifierDataProcessor": (
            "modelzoo_trainer.zoo.data.csv.token_labels:BertTokenClassifierDataProcessor"
        ),
        "DPRHDF5DataProcessor": "modelzoo_trainer.zoo.data.hdf5.dpr:DPRHDF5DataProcessor",
        "DinoImageDataProcessor": "modelzoo_trainer.zoo.data.images.dino:DinoImageDataProcessor",
        "DigitsProcessor": "modelzoo_trainer.zoo.data.digits:DigitsProcessor",
        "DiffusionLatentImageNet1KProcessor": (
            "modelzoo_trainer.zoo.data.images.diffusion:DiffusionLatentImageNet1KProcessor"
        ),
        "DpoHDF5DataProcessor": "modelzoo_trainer.zoo.data.hdf5.dpo:DpoHDF5DataProcessor",
        "GptHDF5DataProcessor": "modelzoo_trainer.zoo.data.hdf5.gpt:GptHDF5DataProcessor",
        "GptHDF5MapDataProcessor": "modelzoo_trainer.zoo.data.hdf5.gpt:GptHDF5MapDataProcessor",
        "HuggingFaceDataProcessor": (
            "modelzoo_trainer.zoo.data.hugging_face.processor:HuggingFaceDataProcessor"
        ),
        "ImageNet1KProcessor": "modelzoo_trainer.zoo.data.images.imagenet:ImageNet1KProcessor",
        "LlavaHDF5MapDataProcessor": (
            "modelzoo_trainer.zoo.data.hdf5.multimodal:LlavaHDF5MapDataProcessor"
        ),
        "MNLIDataProcessor": "modelzoo_trainer.zoo.data.csv.glue:MNLIDataProcessor",
        "MultimodalSimpleHDF5MapDataProcessor": (
            "modelzoo_trainer.zoo.data.hdf5.multimodal:MultimodalSimpleHDF5MapDataProcessor"
        ),
        "SST2DataProcessor": "modelzoo_trainer.zoo.data.csv.glue:SST2DataProcessor",
        "SyntheticProcessor": "modelzoo_trainer.zoo.data.synthetic:SyntheticProcessor",
        "T5DynamicDataProcessor": f"{_SEQ2SEQ}:T5DynamicDataProcessor",
        "TextFileProcessor": "modelzoo_trainer.zoo.data.text_files:TextFileProcessor",
        "TransformerDynamicDataProcessor": f"{_SEQ2SEQ}:TransformerDynamicDataProcessor",
    }
)
"""Name to `module:class`. The constructor of the class is the schema of a dataloader section."""


def processor_class(name: str) -> type[Any]:
    """Return the class of a shipped data processor; this imports its module.

    Args:
        name: A key of `PROCESSORS`, case-insensitive.

    Raises:
        ConfigError: If no shipped data processor has this name.
    """
    by_lower_name = {known.lower(): place for known, place in PROCESSORS.items()}
    place = by_lower_name.get(name.lower())
    if place is None:
        near = suggest(name, PROCESSORS)
        raise ConfigError(
            f"data_processor {name!r} is not a shipped data processor. "
            f"{f'{near} ' if near.startswith('Did') else ''}"
            f"Shipped: {', '.join(sorted(PROCESSORS))}. "
            "For a custom class, give its dotted path: 'mypackage.mymodule.MyProcessor'."
        )
    found: type[Any] = load(place)
    return found
