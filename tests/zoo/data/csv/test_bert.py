"""The processors of BERT's pretraining on CSV files."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data import stream_processor
from modelzoo_trainer.zoo.data.csv.bert import BertCSVDataProcessor, BertCSVDynamicMaskDataProcessor
from modelzoo_trainer.zoo.models.bert.pretraining import Bert
from tests.zoo.data.csv.written import TOKENS, write_folder, write_vocabulary
from tests.zoo.models.bert_cases import SIZES

LENGTH = 12
MASK = TOKENS.index("[MASK]")


def sentence(number, words=8):
    tokens = ["[CLS]", *(["a", "'", '"', "the", "##m", "b", "c", "d"] * 9)[:words], "[SEP]"]
    segments = [0] * (len(tokens) // 2) + [1] * (len(tokens) - len(tokens) // 2)
    return {"tokens": tokens, "segment_ids": segments, "is_random_next": number % 2}


@pytest.fixture
def dynamic(tmp_path):
    """Return a loader of a processor over sentences."""
    numbers = count()

    def make(sentences=None, **arguments):
        rows = sentences or [sentence(number) for number in range(6)]
        vocabulary = write_vocabulary(tmp_path / "vocab.txt")
        defaults = {
            "batch_size": 2,
            "vocab_file": vocabulary,
            "max_sequence_length": LENGTH,
            "max_predictions_per_seq": 3,
            "shuffle": False,
        }
        folder = write_folder(
            tmp_path / str(next(numbers)), rows[:4], *([rows[4:]] if rows[4:] else [])
        )
        return BertCSVDynamicMaskDataProcessor(
            data_dir=folder, **{**defaults, **arguments}
        ).create_dataloader()

    return make


def shapes(batch):
    return {key: tuple(one.shape) for key, one in batch.items()}


def test_a_batch_has_what_the_model_needs(dynamic):
    loader = dynamic(max_predictions_per_seq=2)
    batch, *others = loader
    assert len(others) == 2
    assert shapes(batch) == {
        **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (2, LENGTH)),
        **dict.fromkeys(("labels", "masked_lm_mask", "masked_lm_positions"), (2, 2)),
        "next_sentence_label": (2, 1),
    }
    assert {one.dtype for one in batch.values()} == {torch.int32}
    assert batch["attention_mask"][0].tolist() == [1] * 10 + [0] * 2
    assert batch["token_type_ids"][0].tolist() == [0] * 5 + [1] * 5 + [0] * 2
    assert batch["next_sentence_label"].flatten().tolist() == [0, 1]
    Bert(**SIZES)(batch)["loss"].backward()


def test_labels_are_the_tokens_that_were_there(dynamic):
    ids = [TOKENS.index(one) for one in sentence(0)["tokens"]] + [0, 0]
    for arguments in ({}, {"gather_mlm_labels": False}):
        batch, *_ = dynamic(masked_lm_prob=0.4, **arguments)
        for row in range(2):
            weights = batch["masked_lm_mask"][row]
            counted = weights.nonzero().flatten().tolist()
            places = batch.get("masked_lm_positions", torch.arange(LENGTH).expand(2, -1))[row]
            positions = places[counted].tolist()
            assert len(positions) == 3  # of 0.4 * 10, at most 3
            assert positions == sorted(set(positions))
            assert not {0, 9} & set(positions)  # [CLS], [SEP]
            assert batch["labels"][row][counted].tolist() == [ids[one] for one in positions]
            others = [one for one in range(LENGTH) if one not in positions]
            assert batch["input_ids"][row][others].tolist() == [ids[one] for one in others]
            assert batch["labels"][row][weights == 0].eq(0).all()


def test_eight_of_ten_chosen_tokens_are_hidden_and_one_is_replaced(dynamic):
    rows = [sentence(0, words=60)] * 120
    (batch,) = dynamic(
        rows,
        batch_size=120,
        max_sequence_length=64,
        max_predictions_per_seq=9,
        exclude_from_masking=["[CLS]", "[PAD]", "[MASK]", "[UNK]", "a"],
    )
    found = Counter()
    shown = batch["input_ids"].gather(1, batch["masked_lm_positions"].long())
    assert batch["masked_lm_mask"].sum() == 1080
    found["hidden"] = (shown == MASK).sum().item()
    found["same"] = (shown == batch["labels"]).sum().item()
    found["other"] = 1080 - found["hidden"] - found["same"]
    assert found["hidden"] == pytest.approx(864, abs=50)
    assert found["other"] == pytest.approx(97, abs=40)
    drawn = shown[(shown != MASK) & (shown != batch["labels"])].unique().tolist()
    assert set(drawn) == {TOKENS.index(one) for one in ("'", '"', "the", "##m", "b", "c", "d")}


def masks(loader, epoch=0):
    loader.dataset.set_epoch(epoch)
    return torch.stack([loader.dataset[row]["input_ids"] for row in range(6)])


def test_masks_depend_on_seed_epoch_and_row_alone(dynamic):
    loader = dynamic()
    first = masks(loader)
    assert torch.equal(masks(dynamic(batch_size=3)), first)
    assert not torch.equal(masks(loader, 1), first)
    assert not torch.equal(masks(dynamic(shuffle_seed=1)), first)
    assert torch.equal(masks(loader), first)
    assert not torch.equal(first[0], first[2])
    together = loader.dataset.__getitems__([4, 1])["input_ids"]
    assert torch.equal(together, first[[4, 1]])
    workers = dynamic(num_workers=1, persistent_workers=False)
    assert torch.equal(torch.cat([one["input_ids"] for one in workers]), first)


def test_what_decides_a_batch_is_in_the_fingerprint(dynamic):
    before = dynamic().dataset.fingerprint
    assert dynamic().dataset.fingerprint == before
    for changes in (
        *({"masked_lm_prob": 0.2}, {"mask_whole_word": True}, {"max_predictions_per_seq": 2}),
        *({"exclude_from_masking": ["a"]}, {"do_lower": True}, {"oov_token": "a"}),
        *({"max_sequence_length": LENGTH + 1}, {"labels_pad_id": 1}, {"disable_nsp": True}),
    ):
        assert dynamic(**changes).dataset.fingerprint != before


def test_whole_words_are_hidden_together(dynamic):
    tokens = ["[CLS]", "the", "##m", "a", "##m", "##m", "b", "[SEP]"]
    rows = [{"tokens": tokens, "segment_ids": [0] * 8, "is_random_next": 0}] * 40
    words = [{1, 2}, {3, 4, 5}, {6}]
    (batch,) = dynamic(rows, batch_size=40, mask_whole_word=True, masked_lm_prob=0.5)
    seen = set()
    for places, weights in zip(batch["masked_lm_positions"], batch["masked_lm_mask"], strict=True):
        chosen = {place.item() for place, one in zip(places, weights, strict=True) if one}
        parts = [word for word in words if word & chosen]
        assert set().union(*parts) == chosen
        seen |= {frozenset(word) for word in parts}
    assert len(seen) == 3


def test_the_scale_replaces_the_weight_of_the_model(dynamic):
    batch, *_ = dynamic(dynamic_mlm_scale=True, masked_lm_prob=0.2)
    assert batch["mlm_loss_scale"].tolist() == [[0.5], [0.5]]  # 2 sequences, 4 labels
    model = Bert(**SIZES, mlm_loss_weight=7.0).eval()
    output = model(batch)
    classes = torch.nn.functional.cross_entropy(
        output["nsp_logits"], batch["next_sentence_label"].flatten().long()
    )
    torch.testing.assert_close(output["loss"], output["mlm_loss"] + classes)


def test_tokens_that_the_vocabulary_lacks(dynamic):
    rows = [sentence(0)]
    rows[0]["tokens"] = ["[CLS]", "The", "zebra", "a", "[SEP]"]
    rows[0]["segment_ids"] = [0] * 5
    options = {"batch_size": 1, "exclude_from_masking": rows[0]["tokens"]}
    names = [["[CLS]", "[UNK]", "[UNK]", "a", "[SEP]"], ["[CLS]", "the", "[UNK]", "a", "[SEP]"]]
    for do_lower, expected in enumerate(names):
        (batch,) = dynamic(rows, do_lower=bool(do_lower), **options)
        found = [TOKENS[one] for one in batch["input_ids"][0, :5].tolist()]
        assert found == expected
        assert batch["masked_lm_mask"].sum() == 0


def test_the_next_sentence_follows_the_model(dynamic):
    loader = dynamic()
    check_model(loader, SimpleNamespace(disable_nsp=True))
    batch, *_ = loader
    assert not {"token_type_ids", "next_sentence_label"} & batch.keys()
    Bert(**SIZES, disable_nsp=True)(batch)["loss"].backward()
    check_model(loader, Bert(**SIZES))
    assert "next_sentence_label" in next(iter(loader))
    loader = dynamic(disable_nsp=False)
    with pytest.raises(
        ConfigError, match=r"Processor.disable_nsp is false, but disable_nsp of .* is true"
    ):
        check_model(loader, SimpleNamespace(disable_nsp=True))
    check_model(dynamic(disable_nsp=True), SimpleNamespace(vocab_size=None))


def test_long_sequences_are_cut_or_refused(dynamic):
    rows = [sentence(number, words=14) for number in range(2)]
    with pytest.raises(ConfigError, match=r"row 1: there are 16 tokens, but max_sequence_length"):
        next(iter(dynamic(rows)))
    (batch,) = dynamic(rows, disable_nsp=True)
    assert batch["attention_mask"].all()


def test_padding_has_the_given_values(dynamic):
    pads = {"input_pad_id": 5, "attn_mask_pad_id": 2, "segment_pad_id": 1, "labels_pad_id": -100}
    batch, *_ = dynamic(**pads, masked_lm_prob=0.1)
    keys = ("input_ids", "attention_mask", "token_type_ids", "labels")
    assert [batch[key][0, -1].item() for key in keys] == [5, 2, 1, -100]


@pytest.mark.parametrize(
    ("pads", "facts"),
    [
        ({"input_pad_id": 13}, r"input_pad_id is 13, .* vocab_size of the model \(13\)"),
        ({"labels_pad_id": 13}, r"labels_pad_id is 13, .* vocab_size .* -100"),
        ({"labels_pad_id": -1}, r"labels_pad_id is -1, .* -100"),
        ({"segment_pad_id": 2}, r"segment_pad_id is 2, .* num_segments of the model \(2\)"),
    ],
)
def test_padding_that_the_model_lacks_is_refused(dynamic, pads, facts):
    with pytest.raises(ConfigError, match=facts):
        check_model(dynamic(**pads), SimpleNamespace(vocab_size=13))


def test_what_cannot_work_is_refused(dynamic, tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_file .* has 13 tokens.*vocab_size is 12"):
        check_model(dynamic(), SimpleNamespace(vocab_size=12))
    with pytest.raises(ConfigError, match=r"max_sequence_length of the data is 12.* is 8"):
        check_model(dynamic(), SimpleNamespace(max_position_embeddings=8))
    with pytest.raises(ConfigError, match=r"mask_token: '\[MAKS\]' .*\[MASK\]"):
        dynamic(mask_token="[MAKS]")
    with pytest.raises(ConfigError, match="max_predictions_per_seq is 13"):
        dynamic(max_predictions_per_seq=13)
    with pytest.raises(ConfigError, match="exclude_from_masking excludes all"):
        dynamic(exclude_from_masking=TOKENS)
    lacks = BertCSVDynamicMaskDataProcessor.check_arguments(
        data_dir=str(tmp_path / "no"), vocab_file="none.txt", batch_size=2
    )
    assert len(lacks) == 2
    assert "none.txt" in lacks[1]
    for column, value in (("is_random_next", "x"), ("tokens", "a b"), ("segment_ids", "['a']")):
        rows = [sentence(0) | {column: value}]
        with pytest.raises(ConfigError, match=f"part 0.csv: row 1: {column}"):
            next(iter(dynamic(rows, batch_size=1)))


@pytest.mark.parametrize(
    ("column", "value", "facts"),
    [
        ("is_random_next", 2, "is_random_next has 2"),
        ("tokens", [1, 2], "tokens must be strings"),
        ("tokens", [["a"]], "tokens must be strings"),
        ("tokens", [], "tokens must be strings, at least one"),
        ("segment_ids", [0] * 9, "segment_ids must be integers, 10"),
        ("segment_ids", [0] * 9 + [2], "segment_ids has 2 at 9.* below 2"),
        ("segment_ids", [-1] * 10, "segment_ids has -1 at 0"),
        ("segment_ids", [[0]] * 10, "segment_ids must be integers, 10"),
    ],
)
def test_cells_that_no_model_can_use_are_refused(dynamic, column, value, facts):
    with pytest.raises(ConfigError, match=f"part 0.csv: row 1: {facts}"):
        next(iter(dynamic([sentence(0) | {column: value}], batch_size=1)))


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"attention_mask": [1, 1]}, "attention_mask has 2 values, expected 4"),
        ({"token_type_ids": [0]}, "token_type_ids has 1 values, expected 4"),
        ({"masked_lm_positions": [1]}, "masked_lm_positions has 1 values, expected 2"),
    ],
)
def test_columns_of_other_lengths_are_refused(static, change, facts):
    with pytest.raises(ConfigError, match=facts):
        next(iter(static([static_row(0, **change)] * 2)))


def test_arguments_without_effect_are_logged(dynamic, caplog, monkeypatch):
    monkeypatch.setattr(stream_processor, "_SAID", set())
    ignored = ["shuffle_buffer", "buckets", "vocab_size", "whole_word_masking", "steps"]
    with caplog.at_level(logging.INFO, "modelzoo_trainer.data"):
        dynamic(**dict.fromkeys(ignored, 3))
    assert [name for name in ignored if f".{name} has no effect" in caplog.text] == ignored


# ---- masked when written


def static_row(number, **changes):
    return {
        "input_ids": [2, 4, 7 + number, 3],
        "attention_mask": [1, 1, 1, 1],
        "labels": [8, 0],
        "masked_lm_weights": [1.0, 0.0],
        "masked_lm_positions": [1, 0],
        "token_type_ids": [0, 0, 1, 1],
        "next_sentence_label": number % 2,
    } | changes


@pytest.fixture
def static(tmp_path):
    def make(rows=None, **arguments):
        folder = write_folder(tmp_path, rows or [static_row(number) for number in range(4)])
        options = {"batch_size": 2, **arguments}
        return BertCSVDataProcessor(data_dir=folder, **options).create_dataloader()

    return make


def test_masked_rows_are_read_as_they_are(static):
    batch, _ = static(dynamic_mlm_scale=True)
    assert batch.pop("mlm_loss_scale").tolist() == [[1.0], [1.0]]
    assert {key: one[1].tolist() for key, one in batch.items()} == {
        "input_ids": [2, 4, 8, 3],
        "attention_mask": [1, 1, 1, 1],
        "labels": [8, 0],
        "masked_lm_mask": [1, 0],
        "masked_lm_positions": [1, 0],
        "token_type_ids": [0, 0, 1, 1],
        "next_sentence_label": [1],
    }
    assert {one.dtype for one in batch.values()} == {torch.int32}


def test_columns_may_be_missing(static):
    names = ("input_ids", "attention_mask")
    rows = [{name: static_row(0)[name] for name in names} | {"labels": [-100, 5, -100, -100]}] * 2
    loader = static(rows)
    with pytest.raises(ConfigError, match=r"no column token_type_ids.*disable_nsp: true"):
        check_model(loader, SimpleNamespace(disable_nsp=False))
    check_model(loader, SimpleNamespace(disable_nsp=True, vocab_size=50))
    (batch,) = loader
    assert list(batch) == [*names, "labels"]
    (batch,) = static(rows, dynamic_mlm_scale=True, disable_nsp=True)
    assert batch["mlm_loss_scale"].tolist() == [[1.0], [1.0]]


def without(*names):
    return {key: value for key, value in static_row(0).items() if key not in names}


def test_files_with_other_columns_are_refused(tmp_path):
    folder = write_folder(tmp_path, [without("masked_lm_weights")], [static_row(0)])
    with pytest.raises(ConfigError, match=r"part 1.* has .* masked_lm_weights, .*part 0.* lacks"):
        BertCSVDataProcessor(data_dir=folder, batch_size=2)
    write_folder(tmp_path, [static_row(0)], [without("masked_lm_weights")])
    with pytest.raises(ConfigError, match=r"part 0.* has .* masked_lm_weights, .*part 1.* lacks"):
        BertCSVDataProcessor(data_dir=folder, batch_size=2)


def test_two_columns_of_weights_are_refused(static):
    with pytest.raises(ConfigError, match=r"part 0.csv: .*masked_lm_weights and masked_lm_mask"):
        static([static_row(0, masked_lm_mask=[1, 0])])


def test_positions_without_weights_are_refused(static):
    with pytest.raises(ConfigError, match=r"part 0.csv: .*masked_lm_positions.*masked_lm_weights"):
        static([without("masked_lm_weights")])


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (
            {"input_ids": [2, 4, 99, 3]},
            "row 2: input_ids has 99 at 2, but must be >= 0 and below 50",
        ),
        ({"labels": [50, 0]}, "row 2: labels has 50 at 0"),
        ({"masked_lm_positions": [4, 0]}, "row 2: masked_lm_positions has 4 at 0.* below 4"),
        ({"token_type_ids": [0, 0, 2, 1]}, "row 2: token_type_ids has 2 at 2.* below 2"),
        ({"next_sentence_label": 2}, "row 2: next_sentence_label has 2 at 0.* below 2"),
        ({"attention_mask": [1, 1, 1, 2]}, "row 2: attention_mask has 2 at 3"),
        ({"labels": [8, 0, 0]}, "row 2: labels has 3 values, but other rows have 2"),
        ({"masked_lm_weights": [0.5, 0]}, "row 2: masked_lm_weights must be .* integers"),
        ({"labels": [[8, 0], [8, 0]]}, "row 2: labels must be a list of integers"),
        ({"labels": [[8, 0], [8]]}, "row 2: labels must be a list of integers"),
    ],
)
def test_rows_that_do_not_fit_are_refused(static, change, facts):
    loader = static([static_row(0), static_row(1, **change)])
    check_model(loader, SimpleNamespace(vocab_size=50, max_position_embeddings=4))
    with pytest.raises(ConfigError, match=facts):
        next(iter(loader))


def test_a_model_with_fewer_positions_is_refused(static):
    with pytest.raises(ConfigError, match=r"has 4 tokens, .*max_position_embeddings is 3"):
        check_model(static(), SimpleNamespace(max_position_embeddings=3))
