"""Programs of five lines that train models of `transformers`, and `hf_causal_lm` with adapters.

Each is killed by SIGKILL in the middle of a run, started again, and ends with the weights of a run
that was not killed, which are those of the folder that it writes.
"""

import ast
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
from transformers import (AutoModelForCausalLM, AutoModelForImageClassification,
    AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, BertConfig, GPT2Config, LlamaConfig,
    T5Config, ViTConfig)
from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm

class Kill(Callback):
    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)

KILL = [Kill()]
AdamW = torch.optim.AdamW
tokens = torch.randint(1, 50, (16, 8), generator=torch.Generator().manual_seed(1))
images = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
kinds = torch.arange(16) % 3
torch.manual_seed(0)

def loader(**columns):
    rows = [{key: one[index] for key, one in columns.items()} for index in range(16)]
    return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
"""
PROGRAM = """
config = {config}
model = {model}
trainer = Trainer(model=model, optimizer=lambda model: AdamW(model.parameters(), lr=1e-3),
    loop=TrainingLoop(num_epochs=2), checkpoint=Checkpoint(steps=2), model_dir=folder, seed=1,
    callbacks=KILL, device="cpu")
trainer.fit(loader({columns}))
trainer.model.save_pretrained(folder + "/trained")
"""
PROGRAMS = {
    "bert": PROGRAM.format(
        config="BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_labels=3,"
        " num_attention_heads=2, intermediate_size=32)",
        model="AutoModelForSequenceClassification.from_config(config)",
        columns="input_ids=tokens, labels=kinds",
    ),
    "gpt2": PROGRAM.format(
        config="GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=8,"
        " bos_token_id=0, eos_token_id=0)",
        model="AutoModelForCausalLM.from_config(config)",
        columns="input_ids=tokens, labels=tokens",
    ),
    "llama": PROGRAM.format(
        config="LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1,"
        " num_attention_heads=2, intermediate_size=32)",
        model="AutoModelForCausalLM.from_config(config)",
        columns="input_ids=tokens, labels=tokens",
    ),
    "t5": PROGRAM.format(
        config="T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2,"
        " decoder_start_token_id=0)",
        model="AutoModelForSeq2SeqLM.from_config(config)",
        columns="input_ids=tokens, labels=tokens",
    ),
    "vit": PROGRAM.format(
        config="ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=32,"
        " num_labels=3, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)",
        model="AutoModelForImageClassification.from_config(config)",
        columns="pixel_values=images, labels=kinds",
    ),
    "hf_causal_lm": PROGRAM.format(
        config="dict(model_type='llama', vocab_size=50, hidden_size=32, num_hidden_layers=1,"
        " num_attention_heads=2, intermediate_size=32)",
        model="HfCausalLm(config=config, peft_config=dict(r=2, target_modules=['q_proj']))",
        columns="input_ids=tokens[:, :-1], labels=tokens[:, 1:]",
    ),
}
CLASSES = {
    "bert": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}

# Each run is a process of its own: a fork, which need not import everything again.
RUNNING = """
import sys
root = sys.argv[1]
for name, run in RUNS.items():
    for start, kill_at in (("whole", -1), ("killed", 5), ("killed", -1)):
        child = os.fork()
        if not child:
            KILL_AT = kill_at
            folder = f"{root}/{name}/{start}"
            torch.save(run(folder).state_dict(), folder + "/state.pt")
            os._exit(0)
        print(name, start, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def _as_function(name: str) -> str:
    body = textwrap.indent(PROGRAMS[name] + "return trainer.model", "    ")
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
    assert len(ast.parse(PROGRAMS[name]).body) == 5
    cls: Any = getattr(transformers, CLASSES.get(name, "AutoModelForCausalLM"))
    whole = cls.from_pretrained(runs / name / "whole/trained").state_dict()
    resumed = cls.from_pretrained(runs / name / "killed/trained").state_dict()
    assert whole.keys() == resumed.keys()
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), key


@pytest.mark.parametrize("name", [one for one in PROGRAMS if one != "hf_causal_lm"])
def test_the_folder_has_the_trained_weights(name: str, runs: Path) -> None:
    cls: Any = getattr(transformers, CLASSES.get(name, "AutoModelForCausalLM"))
    found = cls.from_pretrained(runs / name / "killed/trained").state_dict()
    trained = torch.load(runs / name / "killed/state.pt")
    assert trained.keys() == found.keys()
    for key, value in trained.items():
        assert torch.equal(value, found[key]), key
