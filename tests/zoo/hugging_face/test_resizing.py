"""Models with more tokens than the weights of their folder."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel
from tests.zoo.hugging_face.hf_cases import config_of

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_folder")]

OLD, NEW = 100, 112
PEFT = {"r": 2, "target_modules": ["q_proj"]}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folder(request: Any, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = config_of("llama") | {"tie_word_embeddings": request.param}
    HfCausalLm(config=config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def make(folder: Path, **options: Any) -> HfCausalLm:
    torch.manual_seed(1)
    given = {"resize_token_embeddings": NEW, **options}
    return HfCausalLm(pretrained_model_name_or_path=str(folder), **given)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, NEW, (4, 9), generator=torch.Generator().manual_seed(3))
    tokens[0, 4] = NEW - 1
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_it_keeps_its_tokens_and_gets_new_ones(folder: Path) -> None:
    model, before = make(folder), make(folder, resize_token_embeddings=None)
    tokens = torch.randint(0, OLD, (2, 5))
    assert (before.vocab_size, model.vocab_size, model.config.vocab_size) == (OLD, NEW, NEW)
    old, new = before.logits(tokens), model.logits(tokens)
    torch.testing.assert_close(new[..., :OLD], old)
    assert new.shape[-1] == NEW
    rows = model.model.get_input_embeddings().weight
    assert rows.shape[0] == NEW
    assert rows[OLD:].std() < 2 * rows[:OLD].std()
    is_tied = model.model.get_output_embeddings().weight is rows
    assert is_tied == model.config.tie_word_embeddings
    assert make(folder, resize_token_embeddings=OLD).vocab_size == OLD
    with pytest.raises(ConfigError, match=rf"token {NEW - 1}.* resize_token_embeddings: {NEW}"):
        before.check_batch(batch())
    model.check_batch(batch())


def trainer_of(folder: Path, model_dir: Path, steps: int, **options: Any) -> Trainer:
    return Trainer(
        device="cpu",
        progress="none",
        seed=1,
        model=lambda: make(folder, **options),
        model_dir=model_dir,
        loop=TrainingLoop(max_steps=steps, eval_frequency=None),
        checkpoint=Checkpoint(steps=2),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    )


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_run_is_resumed_and_exported(folder: Path, tmp_path: Path, has_adapters: bool) -> None:
    adapters = PEFT | {"modules_to_save": ["embed_tokens", "lm_head"]}
    options: dict[str, Any] = {"peft_config": adapters} if has_adapters else {}
    whole = trainer_of(folder, tmp_path / "whole", 4, **options)
    whole.fit([batch()] * 4)
    trainer_of(folder, tmp_path / "parts", 2, **options).fit([batch()] * 4)
    resumed = trainer_of(folder, tmp_path / "parts", 4, **options)
    resumed.fit([batch()] * 4)

    states = (whole.model.state_dict(), resumed.model.state_dict())
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())
    resumed.model.save_pretrained(tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        expected = resumed.model.eval().logits(ids)
        torch.testing.assert_close(found(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert found.config.vocab_size == NEW


def test_adapters_alone_do_not_train_new_tokens(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"12 new tokens are not trained.*modules_to_save"):
        make(folder, peft_config=PEFT)


def test_other_models_take_it(folder: Path) -> None:
    given = {"pretrained_model_name_or_path": str(folder), "resize_token_embeddings": NEW}
    dpo = Dpo(policy_model={"name": "hf_causal_lm", **given})
    assert dpo.vocab_size == NEW
    assert dpo.ref_model is not None
    assert dpo.ref_model.vocab_size == NEW
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the head
        model = HfModel(auto_class="AutoModelForSequenceClassification", **given)
    assert model.model.get_input_embeddings().num_embeddings == NEW


def test_sizes_that_do_not_work_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"is {OLD - 1}, but the model has {OLD} tokens"):
        make(folder, resize_token_embeddings=OLD - 1)
    with pytest.raises(ConfigError, match="Set vocab_size in config"):
        HfCausalLm.check_arguments(config=config_of("llama"), resize_token_embeddings=NEW)
    with pytest.raises(ConfigError, match=r"init_device is meta\. Set init_device: cpu"):
        make(folder, init_device="meta")
    with pytest.raises(ConfigError, match="set resize_token_embeddings instead of vocab_size"):
        make(folder, resize_token_embeddings=None, config_overrides={"vocab_size": NEW})
