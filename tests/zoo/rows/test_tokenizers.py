"""Tokenizers of the settings: files, special tokens, ids."""

from __future__ import annotations

import json
import pickle

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.tokenizers import Encoded, make_tokenizer
from tests.zoo.rows.toys import BOS, EOS, MASK, PAD, word_tokenizer

tokenizers = pytest.importorskip("tokenizers")


class Upper:
    """A user's tokenizer: letters are their codes."""

    eos_token_id, pad_token_id, vocab_size, eos_token = 0, None, 128, "\0"

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_a_folder_has_the_tokens_and_their_ids(words):
    assert (words.eos_id, words.pad_id, words.vocab_size) == (EOS, PAD, 200)
    assert words.special_id("mask_token") == MASK
    assert words.special_id("cls_token") is None
    assert words.encode_batch(["w20 w21", ""]) == [[20, 21], []]
    assert words.decode([20, EOS]) == "w20 <eos>"


def test_tokens_around_a_text_are_added_on_request(words_with_bos):
    assert words_with_bos.encode_batch(["w20"]) == [[BOS, 20, EOS]]
    assert words_with_bos.encode_batch(["w20"], add_special_tokens=False) == [[20]]
    assert words_with_bos.around() == ([BOS], [EOS])


def test_places_are_those_of_the_characters(words):
    [one] = words.encode_with_spans(["w20  w21"], add_special_tokens=False)
    assert one == Encoded([20, 21], [(0, 3), (5, 8)])


def test_a_file_needs_its_special_tokens_from_the_settings(tmp_path):
    path = word_tokenizer(tmp_path) + "/tokenizer.json"
    assert make_tokenizer(huggingface_tokenizer=path).eos_id is None
    made = make_tokenizer(huggingface_tokenizer=path, tokenizer_params={"eos_token": "<eos>"})
    assert (made.eos_id, made.pad_id) == (EOS, EOS)
    with pytest.raises(ConfigError, match="eos_token '<end>' is not a token"):
        make_tokenizer(huggingface_tokenizer=path, tokenizer_params={"eos_token": "<end>"})
    with pytest.raises(ConfigError, match=r"tokenizer_params\.eos_tokn: .*'eos_token'"):
        make_tokenizer(huggingface_tokenizer=path, tokenizer_params={"eos_tokn": "<eos>"})


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path):
    path = word_tokenizer(tmp_path) + "/tokenizer.json"
    engine = tokenizers.Tokenizer.from_file(path)
    engine.enable_truncation(1)
    engine.enable_padding(length=4)
    engine.save(path)
    made = make_tokenizer(huggingface_tokenizer=path)
    assert made.encode_batch(["w20 w21"]) == [[20, 21]]


def test_ids_of_the_settings_replace_those_of_the_tokenizer(tmp_path):
    folder = word_tokenizer(tmp_path)
    made = make_tokenizer(huggingface_tokenizer=folder, eos_id=7)
    assert (made.eos_id, made.pad_id) == (7, 7)
    made = make_tokenizer(huggingface_tokenizer=folder, eos_id=7, pad_id=5)
    assert (made.eos_id, made.pad_id) == (7, 5)
    with pytest.raises(ConfigError, match=r"eos_id: 200 is not an id .* 0 to 199"):
        make_tokenizer(huggingface_tokenizer=folder, eos_id=200)


def test_gpt2_takes_its_vocabulary_and_merges(tmp_path):
    vocabulary = {"a": 0, "b": 1, "ab": 2, "\u0120": 3, "<|endoftext|>": 4}
    (tmp_path / "vocabulary.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    files = {
        "encoder_file": str(tmp_path / "vocabulary.json"),
        "vocab_file": str(tmp_path / "merges.txt"),
    }
    made = make_tokenizer(custom_tokenizer="gpt2tokenizer", tokenizer_params=files)
    assert made.encode_batch(["ab b<|endoftext|>"]) == [[2, 3, 1, 4]]
    assert (made.eos_id, made.pad_id, made.decode([2, 3, 1])) == (4, 4, "ab b")
    with pytest.raises(ConfigError, match="pad_id: 3 is given, but gpt2tokenizer pads with"):
        make_tokenizer(custom_tokenizer="gpt2tokenizer", tokenizer_params=files, pad_id=3)
    swapped = {"encoder_file": files["vocab_file"], "vocab_file": files["encoder_file"]}
    with pytest.raises(ConfigError, match="encoder_file is the vocabulary"):
        make_tokenizer(custom_tokenizer="gpt2tokenizer", tokenizer_params=swapped)


def test_neox_takes_a_tokenizer_file(tmp_path):
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    engine.add_special_tokens(["<|endoftext|>"])
    engine.save(str(tmp_path / "neox.json"))
    files = {"encoder_file": str(tmp_path / "neox.json")}
    made = make_tokenizer(custom_tokenizer="neoxtokenizer", tokenizer_params=files)
    assert (made.eos_id, made.pad_id) == (1, 1)
    engine.add_special_tokens(["<|padding|>"])
    engine.save(str(tmp_path / "neox.json"))
    made = make_tokenizer(custom_tokenizer="neoxtokenizer", tokenizer_params=files)
    assert (made.eos_id, made.pad_id) == (1, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got neither"),
        ({"custom_tokenizer": "a:B", "huggingface_tokenizer": "b"}, "got both"),
        ({"custom_tokenizer": "gpt2"}, "'gpt2' is not known. Use gpt2tokenizer"),
        ({"custom_tokenizer": "gpt2tokenizer"}, "gpt2tokenizer needs encoder_file"),
        (
            {"custom_tokenizer": "neoxtokenizer", "tokenizer_params": {"vocab_file": "a"}},
            r"tokenizer_params\.vocab_file: no argument of neoxtokenizer",
        ),
        (
            {"custom_tokenizer": "neoxtokenizer", "tokenizer_params": {"encoder_file": "no"}},
            "'no' does not exist",
        ),
        ({"custom_tokenizer": "tests.zoo.rows.toys:Nothing"}, "has no 'Nothing'"),
        ({"custom_tokenizer": "builtins:object"}, "has no 'encode'"),
    ],
)
def test_settings_that_name_no_tokenizer_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        make_tokenizer(**given)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        make_tokenizer(huggingface_tokenizer=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json' cannot be loaded"):
        make_tokenizer(huggingface_tokenizer=str(tmp_path))


def test_a_name_that_the_hub_does_not_give_is_refused(monkeypatch):
    def unreachable(name, **options):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"'a/b' is not a folder or file.*offline"):
        make_tokenizer(huggingface_tokenizer="a/b")


def test_a_name_is_fetched_from_the_hub_without_weights(tmp_path, monkeypatch):
    folder, asked = word_tokenizer(tmp_path), {}

    def fetch(name, **options):
        asked.update(options, name=name)
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    made = make_tokenizer(huggingface_tokenizer="a/b", tokenizer_params={"revision": "v1"})
    assert made.eos_id == EOS
    assert (asked["name"], asked["revision"]) == ("a/b", "v1")
    assert all("tok" in name or "template" in name for name in asked["allow_patterns"])


def test_a_users_tokenizer_encodes_parts_separately_to_know_their_places():
    made = make_tokenizer(custom_tokenizer=f"{__name__}:Upper")
    assert (made.eos_id, made.pad_id, made.vocab_size) == (0, 0, 128)
    assert made.encode_batch(["ab"]) == [[97, 98]]
    [one] = made.encode_with_spans(["abc"], add_special_tokens=False, cuts=[[1]])
    assert one == Encoded([97, 98, 99], [(0, 1), (1, 3), (1, 3)])
    assert made.decode([97]) == "a"
    assert (made.id_of("a"), made.id_of("ab")) == (97, None)


def test_a_tokenizer_can_be_sent_to_another_process(words):
    sent = pickle.loads(pickle.dumps(words))
    assert sent.encode_batch(["w20"]) == [[20]]
    assert sent.eos_id == EOS


def test_the_template_is_that_of_the_settings_the_tokenizer_or_chatml(tmp_path):
    message = [{"role": "user", "content": "x"}]
    names = {"eos_token": {"content": "<eos>"}}
    folder = word_tokenizer(tmp_path / "a", names)
    made = make_tokenizer(huggingface_tokenizer=folder)
    assert made.chat_template().render(message) == "<|im_start|>user\nx<|im_end|>\n"
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    made = make_tokenizer(huggingface_tokenizer=folder)
    assert made.chat_template().render(message) == "x<eos>"
    assert made.chat_template("own {{ messages[0].role }}").render(message) == "own user"
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    folder = word_tokenizer(tmp_path / "b", names | {"chat_template": several})
    assert make_tokenizer(huggingface_tokenizer=folder).chat_template().render(message) == "d"
