"""Decoders with one implementation of attention against another: logits, gradients, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer import Trainer
from modelzoo_trainer.callbacks import Checkpoint, TrainingLoop
from modelzoo_trainer.zoo.models.registry import model_class

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 32,
    "max_position_embeddings": 96,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "embedding_dropout_rate": 0.0,
}
LENGTH = 80
GROUPED = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
POSITIONS: dict[str, dict[str, Any]] = {
    "rotary": {"position_embedding_type": "rotary", "rotary_dim": 6},
    "relative": {"position_embedding_type": "relative"},
    "alibi": {"position_embedding_type": "alibi", "alibi_trainable_slopes": True},
}
SEEN: dict[str, dict[str, Any]] = {
    "causal": {},
    "packed": {},
    "window": {"attention_sliding_window_length": 9},
    "window in every other layer": {
        "attention_sliding_window_length": 9,
        "sliding_window_every_other_decoder_layer": True,
    },
    "sinks": {"attention_sliding_window_length": 9, "attention_sink_tokens": 4},
}
SCORES: dict[str, dict[str, Any]] = {
    "scaled": {},
    "softcap": {"attention_logit_softcapping": 2.0},
    "by layer": {"scale_qk_dot_by_layer_idx": True, **GROUPED},
}


def batch_of(seen: str) -> dict[str, Tensor]:
    ids = torch.randint(0, 53, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1].int(), "labels": ids[:, 1:].int()}
    if seen == "packed":
        lengths = [31, 1, 48]
        spans = torch.cat([torch.arange(num - 1, -1, -1) for num in lengths])
        positions = torch.cat([torch.arange(num) for num in lengths])
        batch["attention_span"] = spans.expand(2, -1).int()
        batch["position_ids"] = positions.expand(2, -1).int()
    return batch


def found(name: str, settings: dict[str, Any], kind: str, batch: Any) -> dict[str, Tensor]:
    """Return the logits and all gradients."""
    torch.manual_seed(0)
    model: Any = model_class(name)(**SIZES | settings, attention=kind)
    packed = {key: batch[key] for key in ("attention_span", "position_ids") if key in batch}
    model(batch)["loss"].backward()
    with torch.no_grad():
        logits = model.logits(batch["input_ids"], **packed)
    return {
        "logits": logits,
        **{name: param.grad for name, param in model.named_parameters() if param.requires_grad},
    }


@pytest.mark.slow_cases(every=4)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("positions", POSITIONS)
def test_each_implementation_is_dense_attention(positions: str, seen: str, scores: str) -> None:
    name = "gptj" if seen == "sinks" else "gpt2"
    settings = POSITIONS[positions] | SEEN[seen] | SCORES[scores]
    if name == "gptj":  # it has fewer settings
        if positions == "alibi":
            settings = settings | POSITIONS["relative"]
        settings = {
            key: one
            for key, one in settings.items()
            if not key.startswith(("alibi", "attention_logit", "scale_qk_dot_by_layer"))
        }
    batch = batch_of(seen)

    expected = found(name, settings, "dense", batch)

    for kind in ("auto", "blocks"):
        ours = found(name, settings, kind, batch)
        torch.testing.assert_close(ours["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        for key, value in expected.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


def test_a_run_goes_on_with_another_implementation(tmp_path: Path) -> None:
    batch = batch_of("causal")

    def train(kind: str, folder: str, num: int) -> tuple[float, int]:
        torch.manual_seed(0)
        model: Any = model_class("gpt2")(**SIZES | SEEN["window"] | {"attention": kind})
        steps = []
        model.register_forward_hook(lambda *_: steps.append(1))
        trainer = Trainer(
            model=lambda: model,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            model_dir=tmp_path / folder,
            loop=TrainingLoop(max_steps=num),
            checkpoint=Checkpoint(steps=3),
            logging=None,
            progress="none",
            device="cpu",
        )
        trainer.fit([batch] * num)
        trainer.close()
        num_trained = len(steps)
        with torch.no_grad():
            return float(model(batch)["loss"]), num_trained

    train("blocks", "run", 3)
    resumed, num_trained = train("dense", "run", 6)

    assert num_trained == 3
    assert resumed == pytest.approx(train("blocks", "whole", 6)[0], rel=1e-5)
