"""Published configurations, scaled down: the rule, whole runs, and the page with the table."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.published_scaling import LENGTH, STEPS, VOCABULARY, scaled
from modelzoo_trainer.config.shipped import shipped_names
from tests.compat.corpus_here import CONFIGURATIONS

ROOT = Path(__file__).resolve().parents[2]
FILE = """\
trainer:
  init:
    backend: {backend_type: CSX}
    seed: 1
    model:
      name: gpt3
      vocab_size: 50257
      hidden_size: 768
      num_hidden_layers: 12
      num_heads: 12
      filter_size: 3072
      max_position_embeddings: 2048
      position_embedding_type: learned
      share_embedding_weights: true
      dropout_rate: 0.1
      loss_scaling: batch_size
      loss_weight: 0.00048828125
    optimizer: {AdamW: {betas: [0.9, 0.95], weight_decay: 0.1}}
    schedulers:
      - LinearLR: {initial_learning_rate: 0, end_learning_rate: 1.0e-5, total_iters: 900}
    precision: {enabled: true, fp16_type: cbfloat16, max_gradient_norm: 1.0}
    loop: {max_steps: 9000, eval_frequency: 1000, eval_steps: 100}
    checkpoint: {steps: 1000}
    callbacks: [{ScopedTrainFlags: {csx.performance.micro_batch_size: 60}}, {ComputeNorm: {}}]
  fit:
    train_dataloader:
      data_processor: GptHDF5MapDataProcessor
      data_dir: ./train
      shuffle: true
      shuffle_seed: 1
      batch_size: 120
      num_workers: 8
    val_dataloader: &val {data_processor: GptHDF5MapDataProcessor, data_dir: ./val, batch_size: 120,
                           shuffle: false}
  validate: {val_dataloader: *val}
"""
LLAMA = """\
vocab_size: 128256
      position_embedding_type: rotary
      rotary_dim: 64
      norm_type: rmsnorm
      nonlinearity: swiglu
      attention_module: multiquery_attention
      extra_attention_params: {num_kv_groups: 3}"""


def section(**model: Any) -> dict[str, Any]:
    return {
        "init": {
            "model": {"hidden_size": 4096, "num_heads": 32, "max_position_embeddings": 8192}
            | model,
            "optimizer": {"Adam": {}},
        },
        "fit": {"train_dataloader": {"data_processor": "X", "data_dir": "a", "batch_size": 120}},
    }


def model_of(**model: Any) -> dict[str, Any]:
    found: dict[str, Any] = scaled(section(**model), Path("d"))[0]["init"]["model"]
    return found


@pytest.mark.parametrize(("groups", "expected"), [(32, 4), (8, 2), (1, 1)])
def test_heads_are_shared_as_before(groups, expected) -> None:
    model = model_of(extra_attention_params={"num_kv_groups": groups}, rotary_dim=64)
    assert model["extra_attention_params"] == {"num_kv_groups": expected}
    assert model["num_heads"] % expected == 0
    assert (model["hidden_size"], model["rotary_dim"]) == (64, 8)  # half of 16


def test_ratios_of_sizes_stay() -> None:
    model = model_of(
        hidden_size=3584,
        num_heads=16,
        attention_inner_dim=4096,
        rotary_dim=256,
        filter_size=14336,
        mup_base_hidden_size=256,
        mup_base_filter_size=1024,
    )
    assert (model["hidden_size"], model["attention_inner_dim"]) == (56, 64)
    assert (model["rotary_dim"], model["filter_size"]) == (16, 224)
    assert (model["mup_base_hidden_size"], model["mup_base_filter_size"]) == (4, 16)


def test_lengths_go_with_the_length_of_a_row() -> None:
    model = model_of(
        vocab_size=128256,
        attention_sliding_window_length=4096,
        pos_scaling_extra_args={"original_max_position_embeddings": 2048, "low_freq_factor": 1.0},
        loss_scaling="batch_size",
        loss_weight=1 / 8192,
        moe={"num_experts": 8, "top_k": 2},
    )
    assert (model["max_position_embeddings"], model["vocab_size"]) == (LENGTH, VOCABULARY)
    assert model["attention_sliding_window_length"] == LENGTH // 2
    assert model["pos_scaling_extra_args"]["original_max_position_embeddings"] == LENGTH // 4
    assert model["loss_weight"] == 1 / LENGTH
    assert model["moe"] == {"num_experts": 4, "top_k": 2}


def test_sink_tokens_have_room_and_a_model_inside_another_is_scaled() -> None:
    given = section(max_position_embeddings=8704, attention_sink_tokens=512)
    sinks = {"name": "add_sink_tokens", "sink_token_id": 255999, "num_sink_tokens": 512}
    given["fit"]["train_dataloader"]["data_transforms"] = [sinks]
    short, loaders = scaled(given, Path("d"))
    num = loaders[0]["data_transforms"][0]["num_sink_tokens"]
    assert num == short["init"]["model"]["attention_sink_tokens"] == 4
    assert short["init"]["model"]["max_position_embeddings"] == LENGTH + num
    assert loaders[0]["data_transforms"][0]["sink_token_id"] < VOCABULARY
    policy = {"name": "mistral", "hidden_size": 4096, "num_heads": 32}
    outer = section()
    outer["init"]["model"] = {"name": "dpo", "policy_model": policy, "dpo": {"beta": 0.1}}
    assert scaled(outer, Path("d"))[0]["init"]["model"]["policy_model"]["hidden_size"] == 64


def test_both_encoders_are_scaled_and_the_file_of_labels_lies_with_the_data() -> None:
    encoder = {"hidden_size": 768, "num_heads": 12, "vocab_size": 30522}
    given = section()
    given["init"]["model"] = {"name": "dpr", "q_encoder": encoder, "ctx_encoder": dict(encoder)}
    short = scaled(given, Path("d"))[0]["init"]["model"]
    assert short["q_encoder"] == short["ctx_encoder"]
    assert (short["q_encoder"]["hidden_size"], short["q_encoder"]["vocab_size"]) == (64, VOCABULARY)
    assert model_of(label_vocab_file="there/labels.json")["label_vocab_file"] == "d/labels.json"


def test_latents_keep_their_patches_and_each_folder_is_new() -> None:
    given = section(name="dit", patch_size=[2, 2], num_classes=1000, vae={"latent_size": [32, 32]})
    loader = given["fit"]["train_dataloader"]
    loader["data_processor"] = "DiffusionLatentImageNet1KProcessor"
    loader["data_dir"], loader["num_classes"] = ["a", "b"], 1000
    short, loaders = scaled(given, Path("d"))
    model = short["init"]["model"]
    assert (model["vae"], model["patch_size"]) == ({"latent_size": [8, 8]}, [2, 2])
    assert model["num_classes"] == loaders[0]["num_classes"] == 8
    assert loaders[0]["data_dir"] == ["d/train_1/0", "d/train_1/1"]


def test_the_run_is_short_and_the_file_unchanged() -> None:
    given = section()
    given["init"] |= {
        "schedulers": [
            {"ScalePerParamLR": {"scheduler": {"SequentialLR": {"schedulers": []}}}},
            {"LinearWD": {"initial_val": 0.1}},
            {"CosineDecayLR": {"param_group_tags": "a", "total_iters": 9}},
        ],
        "callbacks": [{"ScopedTrainFlags": {"csx.performance.micro_batch_size": 30}}],
        "loop": {"num_steps": 400, "eval_frequency": 7},
    }
    given["fit"]["val_dataloader"] = given["fit"]["train_dataloader"]
    given["fit"]["ckpt_path"] = None
    before = copy.deepcopy(given)
    short, loaders = scaled(given, Path("d"))
    assert given == before
    rate = {"ConstantLR": {"learning_rate": 1e-3}}
    assert short["init"]["schedulers"] == [
        {"ScalePerParamLR": {"scheduler": rate}},
        {"LinearWD": {"initial_val": 0.1}},
        {"ConstantLR": {"param_group_tags": "a", "learning_rate": 1e-3}},
    ]
    assert short["init"]["loop"] == {"max_steps": STEPS, "eval_frequency": 10, "eval_steps": 2}
    flags = short["init"]["callbacks"][0]["ScopedTrainFlags"]
    assert flags == {"csx.performance.micro_batch_size": 2}  # a quarter of a batch
    assert [loader["data_dir"] for loader in loaders] == ["d/train_1", "d/val_2"]
    assert "ckpt_path" not in short["fit"]


@pytest.mark.slow
def test_files_are_trained_killed_and_resumed(tmp_path, capsys, monkeypatch) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "a.yaml").write_text(FILE)
    llama = FILE.replace("vocab_size: 50257", LLAMA).replace("name: gpt3", "name: llama")
    llama = llama.replace("      position_embedding_type: learned\n", "")
    (files / "b.yaml").write_text(llama.replace("GptHDF5Map", "GptHDF5"))
    lacking = FILE.replace("name: gpt3", "name: gpt-neox")
    (files / "c.yaml").write_text(lacking.replace("{ComputeNorm: {}}", "{WeirdNorm: {}}"))
    harness = "{BigCodeEvalHarness: {bigcode_args: {tasks: a}}}"
    (files / "d.yaml").write_text(FILE.replace("{ComputeNorm: {}}", harness))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{published._BEGIN}old\n{published._END}after\n")
    monkeypatch.setattr(published, "_PAGE", page)
    assert (
        published.main([str(files), "--jobs", "2", "--write", "--keep", str(tmp_path / "k")]) == 1
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[2] for line in lines[2:6]] == ["yes", "yes", "no", "no"], lines
    assert "'WeirdNorm' is not a callback" in lines[4]
    assert "missing: callback `BigCodeEvalHarness`" in lines[5]
    assert lines[-1] == "2 of 4 files train."
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "`a.yaml` | gpt3 | yes" in text
    assert "old" not in text


def rows_of_page() -> dict[str, tuple[str, str]]:
    """Return of each file of the page whether it trains, and why not."""
    text = (ROOT / "docs/published.md").read_text()
    found = re.findall(r"^\| `([^`]+)` \| [^|]* \| (yes|no) \| [^|]* \| (.*) \|$", text, re.M)
    return {name: (answer, why.strip()) for name, answer, why in found}


@pytest.mark.corpus
def test_the_page_has_every_file_and_the_reasons_of_a_check() -> None:
    """To renew it: python -m benchmarks.published FOLDER --write."""
    rows, names = rows_of_page(), shipped_names()
    folder = CONFIGURATIONS
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*.yaml")}
    assert rows.keys() == paths.keys()
    wrong = {}
    for name, path in paths.items():
        lacks = set(published.checked(path, lambda: names)[0])
        answer, why = rows[name]
        told = (
            set(why.removeprefix("missing: ").split(", ")) if why.startswith("missing") else set()
        )
        if told != lacks or (answer == "yes") != (not why):
            wrong[name] = (rows[name], lacks)
    assert not wrong
