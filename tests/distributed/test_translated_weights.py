"""A folder of Hugging Face, loaded into a sharded decoder of two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Trainer
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.zoo.conversion.hugging_face import plan_export, write_export
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.distributed.engines import whole
from tests.distributed.ranks import run_ranks
from tests.zoo.hugging_face.conversions import InMemory

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 32,
    "max_position_embeddings": 8,
}
LLAMA: dict[str, Any] = SIZES | {
    "position_embedding_type": "rotary",
    "rotary_dim": 4,
    "norm_type": "rmsnorm",
    "nonlinearity": "swiglu",
    "share_embedding_weights": False,
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": False,
}


def load(rank: int, settings: dict[str, Any], folder: Path, home: Path) -> tuple[bool, int, int]:
    """Return whether the weights are those saved, the bytes read, and those of the shards."""
    num_bytes, real = [0], disk.read_at

    def counting(fd: int, views: list[memoryview], position: int) -> int:
        num_bytes[0] += sum(map(len, views))
        return real(fd, views, position)

    disk.read_at = counting
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    with Trainer(
        model=lambda: Gpt2(**settings),
        device="cpu",
        backend={"parallel": {"shard": -1}},
        model_dir=home,
        checkpoint=None,
        progress="none",
    ) as trainer:
        trainer.validate([batch, batch], ckpt_path=folder)
        read = num_bytes[0]
        found = trainer.model.state_dict()
        torch.manual_seed(0)
        expected = Gpt2(**settings).state_dict()
        is_equal = all(torch.equal(whole(found[name]), value) for name, value in expected.items())
        own = sum(param.to_local().nbytes for param in trainer.model.parameters())
    return is_equal, read, own


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LLAMA, SIZES], ids=["llama", "gpt2"])
def test_each_process_gets_its_shards(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gpt2(**settings)
    source = InMemory(dict(model.state_dict()))
    write_export(plan_export(source, model, where="the model"), tmp_path / "hf")

    found = run_ranks(2, load, settings, tmp_path / "hf", tmp_path / "run")

    assert [is_equal for is_equal, _, _ in found] == [True, True]
    if settings is LLAMA:  # all are copies: each process reads its rows
        assert [read for _, read, _ in found] == [own for _, _, own in found]
