"""The keys of all libraries, for the documentation."""

from __future__ import annotations

from typing import Final

from modelzoo_trainer.tools.foreign_configs.llm_foundry.keys import COMMON
from modelzoo_trainer.tools.foreign_configs.llm_foundry.model_keys import MODEL
from modelzoo_trainer.tools.foreign_configs.section import Keys
from modelzoo_trainer.tools.foreign_configs.torchtune.keys import KEYS


def _of(keys: Keys, start: str) -> Keys:
    return {name: key for name, key in keys.items() if name.startswith(start)}


FOREIGN_KEYS: Final[dict[str, Keys]] = {
    "llm-foundry": COMMON,
    "llm-foundry: model hf_causal_lm": _of(MODEL, "hf."),
    "llm-foundry: model mpt_causal_lm": _of(MODEL, "mpt."),
    "torchtune": KEYS,
}
"""Keys by the title of their table."""
