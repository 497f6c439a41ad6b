"""Which tokens of a chat count in the loss, in templates as published models have them."""

from __future__ import annotations

import json

import pytest

from modelzoo_trainer.zoo.rows.modes.finetuning import FinetuningMode
from modelzoo_trainer.zoo.rows.tokenizers import make_tokenizer
from tests.zoo.rows.toys import documents_of, encoded, named, settings_of, tokenizers

TOKENS = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Template, and what is expected to be written and to count for two answers: cd and gh.
TEMPLATES = {
    "chatml": (CHATML, ["cd<|im_end|>", "gh<|im_end|>"]),
    "chatml with white space before its end": (
        CHATML.replace("'<|im_end|>", "'\n<|im_end|>"),
        ["cd\n<|im_end|>", "gh\n<|im_end|>"],
    ),
    "zephyr": (
        "{% for m in messages %}\n{% if m['role'] == 'user' %}\n"
        "{{ '<|user|>\n' + m['content'] + eos_token }}\n{% elif m['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\n' + m['content'] + eos_token }}\n{% endif %}\n{% endfor %}",
        ["cd</s>", "gh</s>"],
    ),
    "llama 3": (
        "{% for m in messages %}{% set text = '<|' + m['role'] + '|>\n\n' + m['content'] | trim "
        "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}"
        "{{ text }}{% endfor %}",
        ["cd<|eot_id|>", "gh<|eot_id|>"],
    ),
    "llama 2": (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}{% else %}"
        "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        ["cd </s>", "gh </s>"],
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
        "{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
        ["cd</s>", "gh</s>"],
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' "
        "else m['role'] %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + "
        "'<end_of_turn>\n' }}{% endfor %}",
        ["cd<end_of_turn>", "gh<end_of_turn>"],
    ),
    "phi 3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
        "{% endfor %}{{ eos_token }}",
        ["cd<|end|>", "gh<|end|>"],
    ),
    "an end that is not a token": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + ' ##END##\n' }}{% endfor %}",
        ["cd ##END##", "gh ##END##"],
    ),
    "a line each": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
        ["cd\n", "gh\n"],
    ),
    "generation blocks": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ 'so ' + m.content + '<|end|>\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}",
        ["so cd<|end|>\n", "so gh<|end|>\n"],
    ),
    "generation blocks of the last answer only": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if loop.last %}"
        "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}",
        ["gh<|end|>"],
    ),
}
CHAT = [("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh")]


@pytest.fixture
def tokenizer(tmp_path):
    """Return a tokenizer of bytes with the special tokens of all templates."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: number for number, letter in enumerate([*TOKENS, *alphabet])}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens(TOKENS)
    engine.save(str(tmp_path / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    return make_tokenizer(huggingface_tokenizer=str(tmp_path))


def mode(tokenizer, template, processing=""):
    given = json.dumps(template)  # a string of YAML
    return FinetuningMode(
        settings_of("finetuning", processing, f"chat_template: {given}"), tokenizer
    )


def counted(tokenizer, made, chat=CHAT):
    """Return the texts of labels that count, one for each run of them."""
    rows, stats = encoded(made, documents_of(chat), 160)
    assert stats.skipped == {}
    row = named(made, rows)
    runs, before = [], 0
    for label, weight in zip(row["labels"], row["attention_mask"], strict=True):
        if weight and not before:
            runs.append([])
        if weight:
            runs[-1].append(label)
        before = weight
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.slow_cases(every=4)
def test_all_answers_and_their_ends_count_and_nothing_else(tokenizer, name):
    template, expected = TEMPLATES[name]
    assert counted(tokenizer, mode(tokenizer, template)) == expected


def test_rows_have_the_text_of_the_template(tokenizer):
    made = mode(tokenizer, TEMPLATES["generation blocks"][0])
    rows, _ = encoded(made, documents_of(CHAT), 160)
    row = named(made, rows)
    ids = [*row["input_ids"][: rows.lengths[0]], row["labels"][rows.lengths[0] - 1]]
    assert tokenizer.decode(ids) == (
        "<|user|>ab<|end|>\n<|assistant|>so cd<|end|>\n"
        "<|user|>ef<|end|>\n<|assistant|>so gh<|end|>\n"
    )


def test_a_system_message_does_not_count(tokenizer):
    chat = [("system", "be brief"), ("user", "ab"), ("assistant", "cd")]
    assert counted(tokenizer, mode(tokenizer, CHATML), chat) == ["cd<|im_end|>"]


def test_weights_of_the_settings_replace_generation_blocks(tokenizer):
    template = TEMPLATES["generation blocks"][0]
    made = mode(tokenizer, template, "semantic_loss_weight: {user: {text: 1}}")
    assert counted(tokenizer, made)[0] == "ab<|end|>"


# As those of Qwen3 and DeepSeek-R1: only the last answer keeps its thinking, or none.
LAST_THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}{% set answer = m.content.split('</think>')[-1] %}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ answer.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NONE_THINKS = LAST_THINKS.replace("loop.last", "false")
THOUGHT = "<think>so</think>cd"


@pytest.mark.parametrize("blocks", [False, True])
def test_an_answer_that_a_template_divides_counts_with_its_thinking(tokenizer, blocks):
    template = LAST_THINKS
    if blocks:
        template = template.replace("{% if loop.last", "{% generation %}{% if loop.last").replace(
            "{{ answer.lstrip('\n') }}",
            "{{ answer.lstrip('\n') + '<|im_end|>' }}{% endgeneration %}",
        )
    made = mode(tokenizer, template)
    expected = "<think>\nso\n</think>\n\ncd<|im_end|>"
    last = [("user", "ef"), ("assistant", THOUGHT)]
    assert counted(tokenizer, made, last) == [expected]
    assert counted(tokenizer, made, [*CHAT[:2], *last]) == ["cd<|im_end|>", expected]


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        (LAST_THINKS, [("user", "ab"), ("assistant", THOUGHT), *CHAT[2:]]),
        (NONE_THINKS, [("user", "ab"), ("assistant", THOUGHT)]),
    ],
)
def test_a_chat_that_loses_its_thinking_makes_no_row(tokenizer, template, chat):
    rows, stats = encoded(mode(tokenizer, template), documents_of(chat), 160)
    assert len(rows.lengths) == 0
    assert list(stats.skipped) == ["the chat template omits or changes a message"]
