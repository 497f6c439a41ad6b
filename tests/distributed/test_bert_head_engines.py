"""Heads of BERT: split, sharded, compiled or computed again, they equal plain ones."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from backends.blocks import checkpoint_activations
from modelzoo_trainer.zoo.models.bert.classifier import BertClassifier
from modelzoo_trainer.zoo.models.bert.token_heads import BertSummarizer, BertTokenClassifier
from tests.distributed.engines import spread, whole
from tests.distributed.ranks import run_ranks
from tests.zoo.models.bert_cases import NO_DROPOUT, SIZES, batch_of

ENGINES: Final = {"split": {"parallel": {"tensor": -1}}, "sharded": {"parallel": {"shard": -1}}}
HEADS: Final = ("classifier", "token_classifier", "extractive_summarization")


def make(head: str) -> Any:
    torch.manual_seed(3)
    settings: dict[str, Any] = {**SIZES, **NO_DROPOUT, "attention_dropout_rate": 0.0}
    if head == "classifier":
        settings["problem_type"] = "single_label_classification"
        return BertClassifier(**settings, num_labels=3, task_dropout=0.0)
    if head == "token_classifier":
        return BertTokenClassifier(**settings, num_classes=5, encoder_output_dropout_rate=0.0)
    return BertSummarizer(**settings)


def inputs(head: str) -> dict[str, Tensor]:
    keys = ("input_ids", "attention_mask", "token_type_ids")
    batch = {key: one for key, one in batch_of({}).items() if key in keys}
    if head == "classifier":
        return batch | {"labels": torch.tensor([0, 2, 1, 1])}
    if head == "token_classifier":
        return batch | {"labels": batch["input_ids"] % 5}
    return batch | {
        "cls_indices": torch.tensor([[0, 4, 7]] * 4),
        "cls_weights": torch.tensor([[1.0, 1.0, 0.0]] * 4),
        "labels": torch.tensor([[1, 0, 0]] * 4),
    }


def learn(model: nn.Module, head: str) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for _ in range(2):
        loss = model(inputs(head))["loss"]
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": {name: whole(param).numpy() for name, param in model.named_parameters()},
    }


def learn_spread(rank: int, head: str, options: dict[str, Any]) -> dict[str, Any]:
    model = make(head).double()
    spread(model, options)
    assert isinstance(model.encoder.layers[0].attention.k_proj.weight, DTensor)
    return learn(model, head)


# CI: each model split, as that is written for each model; sharding is of any module: one model.
@pytest.mark.soak_cases("*-sharded", "!extractive_summarization-sharded")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("head", HEADS)
def test_a_head_of_two_processes_equals_one(head: str, engine: str) -> None:
    expected = learn(make(head).double(), head)

    found = run_ranks(2, learn_spread, head, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_a_head_is_one_graph_and_may_be_computed_again(head: str) -> None:
    expected = learn(make(head), head)

    again = make(head)
    checkpoint_activations(again, "full")
    torch.testing.assert_close(learn(again, head), expected, rtol=0, atol=0)

    compiled = make(head)
    compiled.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(learn(compiled, head), expected, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
