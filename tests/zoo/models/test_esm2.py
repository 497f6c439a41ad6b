"""ESM-2: what differs from BERT."""

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.esm2 import Esm2
from tests.zoo.models.bert_cases import CASES, SIZES, batch_of, make

MASK = CASES["esm2"]["mask_token_id"]


def test_the_default_normalizes_first() -> None:
    model = Esm2(**SIZES)
    assert model.norm_first
    assert model.encoder.layers[0].norm_first
    assert model.dropped_token is None


def test_hidden_tokens_are_zero_and_the_others_are_scaled() -> None:
    model = make("esm2").eval()
    ids = torch.tensor([[5, MASK, MASK, 6, 7, 1], [5, 6, 7, 8, 9, 10]])
    batch = {"input_ids": ids, "attention_mask": (ids != 1).int()}
    hidden = model.encoder._embed(batch, torch.arange(6))
    table = model.encoder.token_embeddings.weight
    torch.testing.assert_close(hidden[0, 1:3], torch.zeros(2, 32))
    torch.testing.assert_close(hidden[0, 3], table[6] * 0.88 / (1 - 2 / 5))
    torch.testing.assert_close(hidden[1, 3], table[8] * 0.88)
    del batch["attention_mask"]
    hidden = model.encoder._embed(batch, torch.arange(6))
    torch.testing.assert_close(hidden[0, 3], table[6] * 0.88 / (1 - 2 / 6))


def test_sequences_without_any_other_token_are_finite() -> None:
    model = make("esm2").eval()
    batch = batch_of(CASES["esm2"])
    batch["input_ids"] = torch.full_like(batch["input_ids"], MASK)
    batch["attention_mask"][1:] = 0
    output = model(batch)
    output["loss"].backward()
    assert output["loss"].isfinite()
    assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"token_dropout": True}, "token_dropout requires mask_token_id"),
        ({"mask_token_id": 51}, r"mask_token_id \(51\) is not in the vocabulary of 51"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, facts) -> None:
    with pytest.raises(ConfigError, match=facts):
        Esm2(**SIZES, **settings)
    with pytest.raises(ConfigError, match=facts):
        Esm2.check_arguments(**SIZES, **settings)
