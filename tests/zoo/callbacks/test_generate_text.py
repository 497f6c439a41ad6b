import logging

import pytest
import torch
from torch import nn

from modelzoo_trainer import ConfigError
from modelzoo_trainer.callbacks import GenerateText


class Counter(nn.Module):
    """A model whose most likely next byte follows the last one in the alphabet, cyclically."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.modes = []

    def forward(self, batch):
        return (self.scale * batch.float()).square().mean()

    def generate(self, input_ids, max_new_tokens, temperature, top_k, generator):
        self.modes.append((self.training, torch.is_grad_enabled()))
        drawn = torch.rand(1, generator=generator)
        tokens = input_ids[0].tolist()
        for _ in range(max_new_tokens):
            step = 1 if temperature == 0 else 1 + int(drawn * 20)
            tokens.append(97 + (tokens[-1] - 97 + step) % 26)
        return torch.tensor([tokens])


@pytest.fixture
def data():
    return [torch.ones(2, 4)] * 2


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_text_is_logged_and_written(make, data, caplog, device):
    caplog.set_level(logging.INFO, logger="modelzoo_trainer")
    trainer = make(GenerateText("ab", 3, temperature=0.0), model=Counter, device=device)
    trainer.fit(data)
    assert (trainer.artifact_dir / "sample.txt").read_text() == "abcde"
    assert "Sample at step 4:\nabcde" in caplog.text
    assert "abcde" in (trainer.artifact_dir / "run.log").read_text()


def test_it_is_drawn_in_eval_mode_and_the_modes_are_restored(make, data):
    trainer = make(GenerateText("a", 1), model=Counter)
    trainer.model.scale.requires_grad_()
    trainer.fit(data)
    assert trainer.model.modes == [(False, False)]
    assert trainer.model.training
    assert trainer.model.dropout.training


def test_a_seed_decides_the_text_and_leaves_the_runs_numbers_alone(make, data, tmp_path):
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        trainer = make(GenerateText("a", 5, seed=seed), model=Counter, model_dir=tmp_path / name)
        trainer.fit(data)
        texts.append((trainer.artifact_dir / "sample.txt").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_an_empty_prompt_begins_with_the_end_of_a_document(make, data):
    trainer = make(GenerateText("", 1, temperature=0.0), model=Counter)
    trainer.fit(data)
    assert (trainer.artifact_dir / "sample.txt").read_text() == "\ni"


def test_a_tokenizer_file_replaces_the_bytes(make, data, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"red": 0, "green": 1} | {f"w{n}": n for n in range(2, 130)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="red"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    callback = GenerateText("w98 w99", 2, temperature=0.0, tokenizer_file_path=str(path))
    trainer = make(callback, model=Counter)
    trainer.fit(data)
    assert (trainer.artifact_dir / "sample.txt").read_text() == "w98 w99 w100 w101"


def test_the_shipped_decoder_generates(make):
    from modelzoo_trainer.zoo.models.registry import model_class

    decoder = model_class("gpt2")
    settings = {"vocab_size": 256, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 1}
    ids = torch.randint(256, (2, 8))
    trainer = make(
        GenerateText("To be", 10),
        model=lambda: decoder(**settings, max_position_embeddings=8, filter_size=16),
        max_steps=1,
    )
    trainer.fit([{"input_ids": ids, "labels": ids}])
    assert (trainer.artifact_dir / "sample.txt").read_text(errors="replace").startswith("To be")


def test_a_model_without_generate_is_refused_at_set_up(make):
    with pytest.raises(ConfigError, match="GenerateText: Net has no method generate"):
        make(GenerateText("a"))


def test_a_tokenizer_that_is_not_there_is_refused_at_set_up(make):
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match=r"tokenizer_file_path 'no\.json' does not exist"):
        make(GenerateText("a", tokenizer_file_path="no.json"), model=Counter)


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}], ids=str
)
def test_a_value_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))}: expected .* >=? 0.*, got"):
        GenerateText("a", **wrong)


def test_a_generate_with_other_arguments_is_refused_at_set_up(make):
    class Other(Counter):
        def generate(self, input_ids, length):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"Other\.generate cannot be called with .*temperature"):
        make(GenerateText("a"), model=Other)


def test_a_prompt_beyond_the_vocabulary_is_refused_at_set_up(make):
    class Small(Counter):
        vocab_size = 98

    make(GenerateText("a"), model=Small)
    with pytest.raises(
        ConfigError, match=r"has the token id 98, but the vocab_size of Small is 98"
    ):
        make(GenerateText("b"), model=Small)
