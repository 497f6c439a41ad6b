"""The published preprocessing files, each by what is particular about it: what is said of it.

docs/preprocessing.md has a table of them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from tests.zoo.rows.toys import word_tokenizer

TEXT = "text_read_hook', read_hook_kwargs: {text_key: text}"
PAIR = "prompt_completion_text_read_hook', read_hook_kwargs: {prompt_key: a, completion_key: b}"
CHAT = (
    "chat_read_hook', read_hook_kwargs: {multi_turn_key: turns, multi_turn_role_key: role, "
    "multi_turn_content_key: content}"
)
DPO = "dpo_read_hook', read_hook_kwargs: {prompt_key: a, chosen_key: b, rejected_key: text}"
CONTEXTS = "context_splits: {MSL_List: [0.03125K, 16], split_fractions: [0.5, 0.5]}"
SPLITS = "data_splits: {train: {split_fraction: 0.5}, test: {split_fraction: 0.5}}"
HOOKS = "modelzoo.data_preparation.data_preprocessing.hooks:"

REFUSED = {
    "curation_corpus_summarization",
    "llava_phase_1_llama3",
    "llava_phase_2_preproc",
    "llava_single_image_token",
    "mllama_preproc_using_llava_phase_2",
    "multimodal_pretraining_conceptual_captions",
}
"""Those that do not run; the others write rows."""

# name: mode and other keys of setup, hook and other keys of processing, keys of dataset, what is
# said ("" = nothing)
SHIPPED = {
    "autoregressive_lm": ("pretraining", TEXT, "", ""),
    "hf_autoregressive_lm": ("pretraining", TEXT, "", ""),
    "wikitext103_lm": ("pretraining", f"{TEXT}, wikitext_detokenize: true", "", ""),
    "bert_pretraining_config": ("pretraining", TEXT, "training_objective: bert_pretraining", ""),
    "esm2_preprocessing_pre_training": (
        "pretraining",
        f"{TEXT}, tokenizer_type: esm",
        "training_objective: mlm",
        "processing.tokenizer_type: unused",
    ),
    "fim_aug": ("pretraining", TEXT, "fim_rate: 0.9, spm_rate: 0.5", "dataset.fim_rate: has no"),
    "pretraining_data_context_split": (f"pretraining, {SPLITS}, {CONTEXTS}", TEXT, "", ""),
    "multimodal_pretraining_conceptual_captions": (
        "pretraining, image_dir: images",
        TEXT,
        "is_multimodal: true",
        "setup.image_dir",
    ),
    "summarization": (
        "finetuning",
        PAIR,
        "sep_token: null, truncate_to_msl: {truncation_mode: keep_start, max_turn_length: 8}",
        "dataset.truncate_to_msl.truncation_mode: no effect",
    ),
    "curation_corpus_summarization": (
        "finetuning",
        "prompt_completion_key', read_hook_kwargs: {prompt_key: a, completion_key: b}",
        "sep_token: <SEP>",
        "there is no 'modelzoo.data_preparation.data_preprocessing.hooks:prompt_completion_key'. "
        "Did you mean 'prompt_completion_text_read_hook'?",
    ),
    "multi_turn_dialogue": ("finetuning", CHAT, "", ""),
    "finetuning_context_split": (f"finetuning, {CONTEXTS}", PAIR, "", ""),
    "finetuning_data_split": (f"finetuning, {SPLITS}", PAIR, "", ""),
    "llava_phase_1_llama3": ("finetuning, image_dir: i", PAIR, "is_multimodal: true", "images"),
    "llava_phase_2_preproc": ("finetuning, image_dir: i", PAIR, "is_multimodal: true", "images"),
    "mllama_preproc_using_llava_phase_2": (
        "finetuning, image_dir: i",
        PAIR,
        "is_multimodal: true",
        "images",
    ),
    "llava_single_image_token": ("null", PAIR, "use_single_image_token: true", "setup.mode"),
    "dpo_preprocessing": (
        "dpo",
        DPO,
        "user_role: user, assistant_role: assistant",
        "dataset.user_role: unused",
    ),
    "nlg_preprocessing": (
        "nlg",
        "nlg_read_hook', read_hook_kwargs: {data_keys: {context_key: ids, completion_key: ids}}",
        "",
        "",
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.slow_cases(every=4)
def test_what_is_said_of_a_published_file(tmp_path, name, caplog) -> None:
    setup, processing, dataset, said = SHIPPED[name]
    (tmp_path / "in").mkdir()
    turns = [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21 w22"}]
    entry = {"text": "w20 w21 w22", "a": "w23 w24", "b": "w25", "turns": turns, "ids": [20, 21]}
    lines = "".join(json.dumps(entry) + "\n" for _ in range(8))
    (tmp_path / "in" / "a.jsonl").write_text(lines, encoding="utf-8")
    text = (
        f"setup: {{mode: {setup}, data: {{type: local, source: {tmp_path / 'in'}}}, "
        f"output_dir: {tmp_path / 'out'}, processes: 1}}\n"
        f"processing: {{huggingface_tokenizer: {word_tokenizer(tmp_path / 'words')}, "
        f"max_seq_length: 16, min_sequence_len: 1, read_hook: '{HOOKS}{processing}}}\n"
        f"dataset: {{{dataset}}}\n"
    )
    notes: list[str] = []
    has_rows = False
    with caplog.at_level(logging.WARNING):
        try:
            settings, notes = parse_settings(text)
            facts = preprocess(settings)
        except ConfigError as error:
            notes = [*notes, str(error)]
        else:
            has_rows = sum(one.stats.rows for one in facts) > 0
    heard = "\n".join([*notes, *(record.getMessage() for record in caplog.records)])
    assert said in heard if said else heard == ""
    assert has_rows == (name not in REFUSED)


def test_all_nineteen_are_here_and_on_the_page() -> None:
    assert len(SHIPPED) == 19
    page = Path(__file__).parents[4].joinpath("docs", "preprocessing.md").read_text("utf-8")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    for name in SHIPPED:
        (line,) = (line for line in lines if f"`{name}`" in line)
        assert ("| no:" in line) == (name in REFUSED)
