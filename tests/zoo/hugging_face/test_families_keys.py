"""No key of a config.json is ignored unless it is known to change nothing."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.family import families, family_of
from modelzoo_trainer.zoo.conversion.readers import HARMLESS

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rotary_dim": 8,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
}
WITHOUT_EFFECT = {
    # how products are cut or fused, the precision of scores, a window that is off
    *("pretraining_tp", "slow_but_exact", "reorder_and_upcast_attn", "attention_softmax_in_fp32"),
    *("scale_attention_softmax_in_fp32", "sliding_window", "max_window_layers"),
    *("use_sliding_window", "num_kv_heads"),  # without a window; in the first Falcon it is 1
    # of other heads, or of training alone
    *("classifier_dropout", "is_decoder", "router_aux_loss_coef"),
    *(f"summary_{one}" for one in ("type", "use_proj", "activation", "proj_to_labels")),
    "summary_first_dropout",
}
NAMES = sorted(
    {family.model_type or family.name: family.architecture for family in families().values()}
)


def other_than(value: Any) -> Any:
    """Return another value of the same kind, or None if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value or type(value)(1)
    if isinstance(value, str):
        return "relu" if value != "relu" else "gelu"
    return None


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_class_counts_is_refused_or_is_known_to_change_nothing(name: str) -> None:
    cls = transformers.CONFIG_MAPPING[name]
    names = {field.name for field in fields(cls)}
    config = cls(**{key: one for key, one in SIZES.items() if key in names}).to_dict()
    usual = read(config)
    ignored = set()
    for field in fields(cls):
        changed = other_than(config.get(field.name))
        if field.default is MISSING or changed is None or field.name in HARMLESS:
            continue
        try:
            if read(config | {field.name: changed}) == usual:
                ignored.add(field.name)
        except ConfigError:
            continue

    assert ignored <= WITHOUT_EFFECT


def read(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    family = family_of(config, where="config.json")
    return family.name, family.read_config(config, "config.json")
