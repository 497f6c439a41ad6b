"""`checkpoint convert` on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelzoo_trainer.checkpointing import save
from modelzoo_trainer.checkpointing.weights import read_weights, write_weights
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.conversion import weights_folder
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.gpt2 import Gpt2

MODEL: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 12,
    "max_position_embeddings": 16,
    "position_embedding_type": "rotary",
    "rotary_dim": 4,
    "norm_type": "rmsnorm",
    "nonlinearity": "swiglu",
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": False,
}


@pytest.fixture
def model() -> Gpt2:
    torch.manual_seed(0)
    return Gpt2(**MODEL)


@pytest.fixture
def params(tmp_path: Path) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(json.dumps({"trainer": {"init": {"model": {"name": "llama", **MODEL}}}}))
    return path


@pytest.fixture
def weights(model: Gpt2, tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    write_weights(model.state_dict(), path)
    return path


@pytest.fixture
def exported(weights: Path, params: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    assert convert(weights, folder, "--to", "hf", "--params", params) == 0
    return folder


def convert(*words: object) -> int:
    return main(["checkpoint", "convert", *map(str, words)])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the message of a command that is refused and leaves nothing behind."""
    folder = Path(str(words[1])).parent
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert convert(*words) == 2
    assert sorted(folder.rglob("*")) == before
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def same_bits(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def test_weights_go_to_hugging_face_and_back(
    model: Gpt2, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert (config["model_type"], config["num_attention_heads"]) == ("llama", 2)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (exported / "generation_config.json").is_file()
    assert "lm_head.weight" not in load_file(exported / "model.safetensors")  # tied
    back = tmp_path / "back"
    assert convert(exported, back, "--from", "hf", "--shard-size", "500") == 0
    assert len(list(back.glob("model-*.safetensors"))) > 2
    assert same_bits(read_weights(back), dict(model.state_dict()))
    assert "settings of the model" in capsys.readouterr().out
    again = tmp_path / "again"  # with the settings of model.yaml
    assert convert(back, again, "--to", "hf", "--dtype", "bfloat16") == 0
    assert load_file(again / "model.safetensors")["model.norm.weight"].dtype is torch.bfloat16
    assert json.loads((again / "config.json").read_text())["dtype"] == "bfloat16"


def test_of_a_run_on_preferences_the_policy_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Dpo(policy_model={"name": "llama", **MODEL})
    policy = trained.policy_model.state_dict()
    with torch.no_grad():
        for value in trained.policy_model.parameters():
            value.add_(1)
    section = {"name": "dpo", "policy_model": {"name": "llama", **MODEL}}
    entry = {"params": {"trainer": {"init": {"model": section}}}}
    save(
        tmp_path / "checkpoint_1", {"model": trained.state_dict(), "__metadata__": [entry]}, step=1
    )
    assert convert(tmp_path / "checkpoint_1", tmp_path / "of_policy", "--to", "hf") == 0
    assert convert(tmp_path / "of_policy", tmp_path / "back", "--from", "hf") == 0
    assert same_bits(read_weights(tmp_path / "back"), policy)
    section["policy_model"] = {"name": "t5"}
    params = tmp_path / "other.yaml"
    params.write_text(json.dumps({"trainer": {"init": {"model": section}}}))
    source, target = tmp_path / "checkpoint_1", tmp_path / "no"
    said = refused(capsys, source, target, "--to", "hf", "--params", params)
    assert "model.policy_model.name: 't5' is not a decoder" in said


def test_a_checkpoint_has_its_settings_in_its_metadata(model: Gpt2, tmp_path: Path) -> None:
    entry = {"params": {"trainer": {"init": {"model": {"name": "llama", **MODEL}}}}}
    state = {"model": model.state_dict(), "__metadata__": [entry]}
    save(tmp_path / "checkpoint_1", state, step=1)
    (tmp_path / "latest").symlink_to("checkpoint_1")
    assert convert(tmp_path / "latest", tmp_path / "hf", "--to", "hf") == 0
    found = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], model.token_embeddings.weight)


def test_a_checkpoint_has_its_settings_in_the_log_of_its_run(
    model: Gpt2, params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "checkpoint_1", {"model": model.state_dict()}, step=1)
    words = (tmp_path / "checkpoint_1", tmp_path / "hf", "--to", "hf")
    assert "--params FILE" in refused(capsys, *words)
    (tmp_path / "logs/latest").mkdir(parents=True)
    params.rename(tmp_path / "logs/latest/params.yaml")
    assert convert(*words) == 0


def test_a_damaged_checkpoint_is_refused(
    model: Gpt2, params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "checkpoint_1", {"model": model.state_dict()}, step=1)
    file = tmp_path / "checkpoint_1/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    words = (tmp_path / "checkpoint_1", tmp_path / "hf", "--to", "hf", "--params", params)
    assert "checksum mismatch" in refused(capsys, *words)


@pytest.mark.parametrize("target", ["zoo", "zoo.pt"])
def test_weights_go_to_the_names_of_the_model_zoo_and_back(
    target: str, model: Gpt2, weights: Path, params: Path, tmp_path: Path
) -> None:
    zoo = tmp_path / target
    assert convert(weights, zoo, "--to", "cerebras", "--params", params) == 0
    found = read_weights(zoo)
    assert "model.transformer_decoder.layers.0.self_attn.proj_q_dense_layer.weight" in found
    rows = found["model.transformer_decoder.layers.1.self_attn.proj_k_dense_layer.weight"]
    own = model.state_dict()["layers.1.attention.k_proj.weight"]
    assert torch.equal(rows[:4], own[[0, 2, 1, 3]])
    back = tmp_path / "back"
    assert convert(zoo, back, "--from", "cerebras", "--params", params) == 0
    assert same_bits(read_weights(back), dict(model.state_dict()))
    assert convert(zoo, tmp_path / "hf", *_zoo_to_hf(params)) == 0


def _zoo_to_hf(params: Path) -> Iterator[object]:
    yield from ("--from", "cerebras", "--to", "hf", "--params", params)


def test_names_of_the_converters_there_have_no_prefix_and_the_final_norm_twice(
    weights: Path, params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(weights, tmp_path / "zoo", "--to", "cerebras", "--params", params)
    found = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in load_file(tmp_path / "zoo/model.safetensors").items()
    }
    found["ln_f.weight"] = found["transformer_decoder.norm.weight"].clone()
    torch.save({"model": found}, tmp_path / "there.pt")
    words = (tmp_path / "there.pt", tmp_path / "back", "--from", "cerebras", "--params", params)
    assert convert(*words) == 0
    found["ln_f.weight"] += 1
    torch.save({"model": found}, tmp_path / "other.pt")
    assert "ln_f.weight differs" in refused(
        capsys, tmp_path / "other.pt", tmp_path / "no", *words[2:]
    )


def test_hdf5_is_refused_by_name(
    params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoint_0.mdl").write_bytes(b"\x89HDF\r\n\x1a\n")
    words = ("--from", "cerebras", "--params", params)
    text = refused(capsys, tmp_path / "checkpoint_0.mdl", tmp_path / "no", *words)
    assert "HDF5" in text
    assert "cstorch.load" in text


def test_options_and_sources_of_another_layout_are_refused(
    exported: Path, weights: Path, params: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--to", "cerebras", "--params", params, "--tokenizer", exported)
    assert "--tokenizer has no effect" in refused(capsys, weights, tmp_path / "no", *words)
    assert convert(exported, tmp_path / "ours", "--from", "hf") == 0
    text = refused(capsys, tmp_path / "ours", tmp_path / "no", "--from", "hf")
    assert "has weights of this trainer (model.yaml)" in text


def test_a_bad_folder_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*words: object) -> str:
        return refused(capsys, exported, tmp_path / "no", *(words or ("--from", "hf")))

    assert "Pass --from hf" in text("--to", "hf")
    assert "neither --from nor --to" in text("--dtype", "float32")
    assert "--params has no effect" in text("--from", "hf", "--params", "x.yaml")
    assert "--shard-size" in text("--from", "hf", "--shard-size", "big")
    config = json.loads((exported / "config.json").read_text())

    def changed(**keys: Any) -> str:
        (exported / "config.json").write_text(json.dumps(config | keys))
        return text()

    assert "'zzz' has no decoder here. Supported: bloom" in changed(model_type="zzz")
    assert "model_type is None; expected a string" in changed(model_type=None)
    assert "the settings give [24, 8]" in changed(intermediate_size=24)
    assert "hidden_act: tanh has no counterpart" in changed(hidden_act="tanh")
    assert "has no tensor 'model.layers.2" in changed(num_hidden_layers=3)
    assert "tensor 'model.layers.1" in changed(num_hidden_layers=1)
    (exported / "model.safetensors").rename(exported / "model.pkl")
    assert "no weights" in changed()
    (exported / "model.pkl").unlink()
    assert changed().endswith("Complete the download ('hf download NAME --local-dir DIR').\n")
    (exported / "config.json").write_text("[" * 100_000)
    assert "cannot be read as JSON" in text()
    (exported / "config.json").unlink()
    assert "no config.json" in text()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_no_ordinary_floats_are_refused(
    dtype: torch.dtype, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(exported / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, exported / "model.safetensors")
    text = refused(capsys, exported, tmp_path / "no", "--from", "hf")
    assert f"'model.norm.weight' is of {dtype}" in text
    assert "dequantize" in text


def test_a_tokenizer_that_does_not_fit_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokenizer.json"
    tokens = {f"t{number}": number for number in range(20)}
    file.write_text(json.dumps({"model": {"vocab": tokens | {"more": 20}}}))
    words = ("--from", "hf", "--tokenizer", file)
    text = refused(capsys, exported, tmp_path / "no", *words)
    assert "ids up to 20, but the model has vocab_size 20" in text
    file.write_text(json.dumps({"model": {"vocab": tokens}}))
    assert convert(exported, tmp_path / "yes", *words) == 0
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "t3"}}
    (tmp_path / "yes/tokenizer_config.json").write_text(json.dumps(special))
    assert convert(tmp_path / "yes", tmp_path / "again", "--to", "hf") == 0
    assert (tmp_path / "again/tokenizer.json").read_bytes() == file.read_bytes()
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / "again" / name).read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (None, 3)


def test_tokens_that_are_added_to_a_sentencepiece_model_must_fit(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (exported / "tokenizer.model").write_bytes(b"any")
    (exported / "generation_config.json").unlink()

    def add(number: int) -> None:
        added = {"added_tokens_decoder": {str(number): {"content": "<pad>"}}, "pad_token": "<pad>"}
        (exported / "tokenizer_config.json").write_text(json.dumps(added))

    add(20)
    text = refused(capsys, exported, tmp_path / "no", "--from", "hf")
    assert "ids up to 20, but the model has vocab_size 20" in text
    add(19)
    assert convert(exported, tmp_path / "yes", "--from", "hf") == 0
    assert convert(tmp_path / "yes", tmp_path / "again", "--to", "hf") == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["pad_token_id"] == 19


def test_values_beyond_the_range_of_a_dtype_are_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(exported / "model.safetensors")
    tensors["model.norm.weight"][3] = -1e5
    save_file(tensors, exported / "model.safetensors")
    words = ("--from", "hf", "--dtype")
    text = refused(capsys, exported, tmp_path / "no", *words, "float16")
    assert "'final_norm.weight' has values up to 1e+05" in text
    assert convert(exported, tmp_path / "yes", *words, "bfloat16") == 0
    tensors["model.norm.weight"][3] = float("inf")  # kept as it is
    save_file(tensors, exported / "model.safetensors")
    assert convert(exported, tmp_path / "infinite", *words, "float16") == 0


def test_tied_weights_that_differ_are_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(exported / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, exported / "model.safetensors")
    assert convert(exported, tmp_path / "yes", "--from", "hf") == 0
    tensors["lm_head.weight"] += 1
    save_file(tensors, exported / "model.safetensors")
    text = refused(capsys, exported, tmp_path / "no", "--from", "hf")
    assert "tie_word_embeddings" in text


def test_nothing_is_left_of_a_target_that_cannot_be_written(
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "already exists" in refused(capsys, exported, exported, "--from", "hf")
    assert "is not a folder" in refused(capsys, exported, tmp_path / "a/b", "--from", "hf")

    def full(fd: int, view: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_folder.disk, "write", full)
    text = refused(capsys, exported, tmp_path / "no", "--from", "hf")
    assert "No space left on device" in text
    monkeypatch.setattr(weights_folder, "free_bytes", lambda folder: 10)
    assert "are free" in refused(capsys, exported, tmp_path / "no", "--from", "hf")


def test_rounded_norms_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = MODEL | {
        "nonlinearity": "geglu_new",
        "norm_first_sandwich": True,
        "embeddings_scale": 8**0.5,
    }
    model = Gpt2(**settings)
    params = tmp_path / "params.yaml"
    params.write_text(json.dumps({"model": {"name": "gemma2", **settings}}))
    for number, value in enumerate((0.75, 0.1)):
        torch.nn.init.constant_(model.final_norm.weight, value)
        write_weights(model.state_dict(), tmp_path / f"{number}.safetensors")
        words = (tmp_path / f"{number}.safetensors", tmp_path / f"hf{number}", "--to", "hf")
        assert convert(*words, "--params", params, "--family", "gemma2") == 0
        assert ("8 values of norms are rounded" in capsys.readouterr().out) == bool(number)


LINKED = {
    "--from hf": ("config.json", "model.safetensors", "generation_config.json", "vocab.txt"),
    "--to hf": ("model.safetensors", "model.yaml", "merges.txt", "chat_template.jinja"),
    "--from cerebras": ("model.safetensors",),
}


def folder_for(words: str, exported: Path, params: Path, tmp_path: Path) -> Path:
    if words == "--from hf":
        folder = exported
    else:
        folder = tmp_path / "folder"
        to = ("--to", "cerebras") if words == "--from cerebras" else ()
        assert convert(exported, folder, "--from", "hf", *to) == 0
    (folder / "vocab.txt").write_text("a\n")
    (folder / "merges.txt").write_text("#\n")
    (folder / "chat_template.jinja").write_text("a")
    return folder


@pytest.mark.parametrize(
    ("words", "name"), [(words, name) for words, names in LINKED.items() for name in names]
)
@pytest.mark.slow_cases(every=4)
def test_a_link_out_of_the_folder_is_refused_and_one_within_is_read(
    words: str,
    name: str,
    exported: Path,
    params: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_for(words, exported, params, tmp_path)
    more = ("--params", params) if words == "--from cerebras" else ()
    (folder / "parts").mkdir()
    (folder / name).rename(folder / "parts" / name)
    (folder / name).symlink_to(f"parts/{name}")
    assert convert(folder, tmp_path / "within", *words.split(), *more) == 0
    (folder / name).unlink()
    (folder / "parts" / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to("../elsewhere")
    text = refused(capsys, folder, tmp_path / "no", *words.split(), *more)
    assert f"{name}' is a symbolic link to '{(tmp_path / 'elsewhere').resolve()}', outside" in text


def test_links_of_shards_and_of_the_log_of_a_run_are_refused_too(
    model: Gpt2,
    exported: Path,
    params: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    back = tmp_path / "back"
    assert convert(exported, back, "--from", "hf", "--shard-size", "500") == 0
    shard = sorted(back.glob("model-*.safetensors"))[0]
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to("../elsewhere")
    words = (back / "model.safetensors.index.json", tmp_path / "no", "--to", "hf")
    assert f"{shard.name}' is a symbolic link" in refused(capsys, *words, "--params", params)
    run = tmp_path / "run"
    (run / "logs" / "1").mkdir(parents=True)
    (run / "logs" / "latest").symlink_to("1")
    save(run / "checkpoint_1", {"model": model.state_dict()}, step=1)
    (run / "logs" / "1" / "params.yaml").symlink_to(params)
    words = (run / "checkpoint_1", tmp_path / "no", "--to", "hf")
    assert "params.yaml' is a symbolic link" in refused(capsys, *words)
    (run / "logs" / "1" / "params.yaml").unlink()
    (run / "logs" / "1" / "params.yaml").write_bytes(params.read_bytes())
    assert convert(run / "checkpoint_1", tmp_path / "yes", "--to", "hf") == 0


def test_a_folder_of_the_cache_of_the_hub_is_read(exported: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--some--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (exported / "vocab.txt").write_text("a\n")
    for number, path in enumerate(sorted(exported.iterdir())):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert convert(snapshot, tmp_path / "ours", "--from", "hf") == 0
    assert (tmp_path / "ours" / "vocab.txt").read_text() == "a\n"


def test_a_tokenizer_that_is_a_link_out_of_its_folder_is_not_copied(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to("../elsewhere")
    words = (exported, tmp_path / "no", "--from", "hf", "--tokenizer")
    assert "tokenizer.json' is a symbolic link" in refused(capsys, *words, folder)
    # named by the user, not by the folder
    assert convert(*words, folder / "tokenizer.json") == 0
