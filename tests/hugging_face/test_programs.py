"""Programs of five lines that train models of `transformers`, and `hf_causal_lm` with adapters.

Each is killed by SIGKILL in the middle of a run, started again, and ends with the weights of a run
that was not killed.
"""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow

PREPARED = """
import os, signal, torch
from transformers import (BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel,
    LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, ViTConfig,
    ViTForImageClassification)
from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.models.hugging_face.causal_lm import HfCausalLm

class Kill(Callback):
    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)

KILL = [Kill()]
tokens = torch.randint(1, 50, (16, 8), generator=torch.Generator().manual_seed(1))
images = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
kinds = torch.arange(16) % 3
torch.manual_seed(0)
"""
PROGRAMS = {
    "BertForSequenceClassification": """
config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=32, num_labels=3)
model, data = BertForSequenceClassification(config), {"input_ids": tokens, "labels": kinds}
""",
    "GPT2LMHeadModel": """
config = GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=8, bos_token_id=0,
                    eos_token_id=0)
model, data = GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}
""",
    "LlamaForCausalLM": """
config = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                     intermediate_size=32)
model, data = LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}
""",
    "T5ForConditionalGeneration": """
config = T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2,
                  decoder_start_token_id=0)
model, data = T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}
""",
    "hf_causal_lm": """
config = {"model_type": "llama", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "intermediate_size": 32}
model = HfCausalLm(config=config, peft_config={"r": 2, "target_modules": ["q_proj"]})
data = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
""",
    "ViTForImageClassification": """
config = ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=32, num_labels=3,
                   num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model, data = ViTForImageClassification(config), {"pixel_values": images, "labels": kinds}
""",
}
TRAINING = """
rows = [{key: one[index] for key, one in data.items()} for index in range(16)]
trainer = Trainer(model=model, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    loop=TrainingLoop(num_epochs=2), checkpoint=Checkpoint(steps=2), model_dir=folder, seed=1,
    callbacks=KILL, device="cpu")
trainer.fit(torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True))
trainer.model.save_pretrained(folder + "/trained")
"""


# Each run is a process of its own: a fork, which need not import everything again.
RUNNING = """
import sys
root = sys.argv[1]
for name, run in RUNS.items():
    for start, kill_at in (("whole", -1), ("killed", 5), ("killed", -1)):
        child = os.fork()
        if not child:
            KILL_AT = kill_at
            run(f"{root}/{name}/{start}")
            os._exit(0)
        print(name, start, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _as_function(name: str) -> str:
    body = textwrap.indent(PROGRAMS[name] + TRAINING, "    ")
    return f"def run(folder):\n{body}\nRUNS[{name!r}] = run\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("programs")
    program = "\n".join([PREPARED, "RUNS = {}", *map(_as_function, PROGRAMS), RUNNING])
    call = [sys.executable, "-c", program, str(root)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    ends = [("whole", 0), ("killed", -9), ("killed", 0)]
    expected = [f"{name} {start} {code}" for name in PROGRAMS for start, code in ends]
    assert done.stdout.splitlines() == expected, done.stderr
    return root


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_resumes_after_sigkill_and_saves(name: str, runs: Path) -> None:
    cls: Any = getattr(transformers, name, transformers.LlamaForCausalLM)
    whole = cls.from_pretrained(runs / name / "whole/trained").state_dict()
    resumed = cls.from_pretrained(runs / name / "killed/trained").state_dict()
    assert whole.keys() == resumed.keys()
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), key
