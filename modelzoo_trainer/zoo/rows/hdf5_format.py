"""The names in files of token rows, which preprocessing writes and the data processors read."""

from __future__ import annotations

from typing import Final

SUFFIX: Final = ".h5"
DATASET: Final = "data"
"""The dataset with the samples of a file."""
COUNT: Final = "n_examples"
"""The attribute with the number of its rows."""
PARAMS: Final = "data_params.json"
"""The file of a folder with the settings and counts of its preprocessing."""
INCOMPLETE: Final = "INCOMPLETE.json"
"""A file that is in a folder from the start of a preprocessing until its end."""

INPUTS: Final = "input_ids"
MASK: Final = "attention_mask"
LABELS: Final = "labels"
SPAN: Final = "attention_span"
POSITIONS: Final = "position_ids"
SEGMENTS: Final = "token_type_ids"
MASKED_WEIGHTS: Final = "masked_lm_mask"
LOSS_MASK: Final = "loss_mask"
KEY_PADDING: Final = "key_padding_mask"
MODALITY: Final = "token_modality_idx"
FEATURES: Final = (INPUTS, MASK, LABELS)
"""The second dimension of the dataset."""
VSL_FEATURES: Final = (*FEATURES, SPAN, POSITIONS)
"""The same for rows of several documents that do not attend to each other."""
DPO_FEATURES: Final = tuple(
    f"{answer}_{feature}" for answer in ("chosen", "rejected") for feature in FEATURES
)
"""The same for pairs of answers."""
IMAGE_TEXT_FEATURES: Final = ("text_input_ids", LOSS_MASK, LABELS, KEY_PADDING)
"""The same for text with images; files may have further ones, `MODALITY` first."""
IMAGE_NAMES: Final = "img_path"
"""The dataset with the names of the images of each row, NO_IMAGE for one that is not there."""
IMAGE_PLACES: Final = "img_data_loc"
"""The dataset with the positions of the patches of these images."""
NO_IMAGE: Final = "None"
IGNORED_LABEL: Final = -100
"""A label that counts in no loss."""
