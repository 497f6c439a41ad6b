"""A model whose settings have a section of another model."""

from __future__ import annotations

import pytest

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import Problems
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError

TEXT = """\
trainer:
  init:
    device: cpu
    model:
      name: dpo
      dpo: {%s}
      policy_model: {%s}
  validate:
    val_dataloader: {data_processor: DigitsProcessor, split: val, batch_size: 90}
"""
SMALL = "name: llama, hidden_size: 16, num_heads: 2, num_hidden_layers: 1"


def plan_of(policy=SMALL, dpo=""):
    text = TEXT % (dpo, policy)
    (plan,) = check_config(read_text(text, "p.yaml"), shipped_names(), None, Problems())
    return plan


def test_the_inner_model_is_built_from_its_section_without_inert_settings():
    plan = plan_of(f"{SMALL}, attention_chunk_size: 3")
    assert [str(note) for note in plan.notes] == [
        "p.yaml:7:88: trainer.init.model.policy_model.attention_chunk_size: no effect (nor in the "
        "Cerebras Model Zoo)."
    ]
    model = plan.init["model"].build()
    assert model.policy_model.hidden_size == 16


@pytest.mark.parametrize(
    ("policy", "dpo", "message"),
    [
        ("name: llama, hiden_size: 16", "", r"p\.yaml:7:35: .*policy_model\.hiden_size: .*hidden_"),
        ("name: llama, hidden_size: a", "", r"p\.yaml:7:48: .*an integer > 0, got 'a'"),
        ("name: lama", "", r"p\.yaml:7:28: .*'lama'.*'llama'"),
        ("hidden_size: 16", "", r"p\.yaml:7:7: .*policy_model\.name"),
        (f"{SMALL}, filter_size: 0", "", r"p\.yaml:7:101: .*filter_size"),
        ("name: llama, hidden_size: 16, num_heads: 3", "", r"p\.yaml:7:35: .*hidden_size"),
        (SMALL, "betta: 1", r"p\.yaml:6:13: .*betta.*'beta'"),
        (SMALL, "beta: 0", r"p\.yaml:6:13: .*beta"),
    ],
)
def test_a_mistake_in_the_inner_model_is_reported_at_its_line(policy, dpo, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(policy, dpo)


LLAVA = """\
trainer:
  init:
    device: cpu
    model:
      name: llava
      image_model: {name: ViTModel, hidden_size: 16, num_heads: 2, image_size: [32, 32], %s}
      text_model: {name: LlamaModel, hidden_size: 16, num_heads: 2, %s}
      projector:
        image_model: {name: FeedForwardNetwork, input_unit: 16, layers_units: [16], %s}
  validate:
    val_dataloader: {data_processor: DigitsProcessor, split: val, batch_size: 90}
"""


def notes_of(image="", text="", layers=""):
    given = read_text(LLAVA % (image, text, layers), "p.yaml")
    (plan,) = check_config(given, shipped_names(), None, Problems())
    return [str(note) for note in plan.notes]


def test_older_names_of_parts_of_llava_are_known():
    assert notes_of() == [
        "p.yaml:7:26: trainer.init.model.text_model.name: LlamaModel is an older name of llama."
    ]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"image": "filter_sise: 8"}, r"p\.yaml:6:90: .*image_model\.filter_sise.*'filter_size'"),
        ({"image": "patch_size: [5, 5]"}, r"p\.yaml:6:\d+: .*image_model\.image_size"),
        ({"image": "dropout_rate: a"}, r"p\.yaml:6:90: .*image_model\.dropout_rate.*'a'"),
        ({"text": "filter_sise: 8"}, r"p\.yaml:7:69: .*text_model\.filter_sise.*'filter_size'"),
        ({"text": "loss_weight: 2.0"}, r"p\.yaml:7:69: .*text_model\.loss_weight"),
        ({"layers": "use_bais: true"}, r"p\.yaml:9:85: .*image_model\.use_bais.*'use_bias'"),
        ({"layers": "layers_activation: [a]"}, r"p\.yaml:9:105: .*layers_activation"),
    ],
)
def test_a_mistake_in_a_part_of_llava_is_reported_at_its_line(parts, message):
    with pytest.raises(ConfigError, match=message):
        notes_of(**parts)
